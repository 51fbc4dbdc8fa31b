"""Upgrades of the labeling app as a service: what stays, and what is put back."""

import sqlite3
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from labeling_app.db.files.schema import STEPS
from tests.examples.deploy.conftest import Installed
from tests.examples.deploy.serving import DEPLOY, label_database
from tests.pipeline.earlier.archive import ARCHIVE
from tests.servers.commands import free_port

# systemctl for one service, which runs whatever version is current
SYSTEMCTL = """#!/usr/bin/env bash
cd "$STATE"
case $1 in
start) nohup "$ROOT/current/bin/rlhf" label --db "$DB" --port "$PORT" >>log 2>&1 & echo $! >pid ;;
stop) kill "$(cat pid)" 2>/dev/null; timeout 60 tail --pid="$(cat pid)" -f /dev/null ;;
esac
"""
BROKEN = """
import os, socket, sqlite3, time

def serve(db, *options):
    with sqlite3.connect(db) as connection:
        connection.execute("CREATE TABLE of_the_new_version (name TEXT)")
    ENDING

BoardOptions = LiveOptions = dict
"""
STOPS = 'raise SystemExit("this version does not start")'
HANGS = 'held = socket.create_server(("127.0.0.1", int(os.environ["PORT"]))); time.sleep(600)'


@pytest.fixture
def service(installed: Installed, tmp_path: Path) -> dict[str, str]:
    """A running service of the installed version, and the variables that upgrade.sh reads."""
    root, state = tmp_path / "opt", tmp_path / "state"
    for folder in (root, state, tmp_path / "backups", tmp_path / "bin"):
        folder.mkdir()
    (root / "current").symlink_to(installed.bin.parent)
    database = label_database(tmp_path / "labels.db")
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    port = str(free_port())
    [dependencies] = (installed.bin.parent / "lib").glob("python*/site-packages/base.pth")
    python = Path(sys._base_executable).parent
    environment = {
        **{"ROOT": str(root), "STATE": str(state), "DB": str(database), "PORT": port},
        **{"BACKUPS": str(tmp_path / "backups"), "URL": f"http://127.0.0.1:{port}/healthz"},
        **{"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"},
        "WAIT": "90",
        "PYTHONPATH": dependencies.read_text().strip(),
        "PATH": f"{tmp_path / 'bin'}:{python}:/usr/sbin:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    subprocess.run([str(systemctl), "start", "rlhf-label"], env=environment, check=True)
    yield environment
    subprocess.run([str(systemctl), "stop", "rlhf-label"], env=environment, check=False)


def upgrade(wheel: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    script = [str(DEPLOY / "upgrade.sh"), str(wheel)]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_upgrade_is_checked_before_it_stays(wheel: Path, service: dict[str, str]) -> None:
    before = Path(service["ROOT"], "current").resolve()
    done = upgrade(wheel, service)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(service["ROOT"], "current").resolve() != before
    assert "answers. To go back" in done.stdout
    assert len(list(Path(service["BACKUPS"]).iterdir())) == 1


def steps_and_rows(path: Path) -> tuple[set[str], tuple[int, int]]:
    """The steps of the schema that a database has had, and its prompts and rankings."""
    with closing(sqlite3.connect(path)) as database:
        steps = {name for (name,) in database.execute("SELECT name FROM _sqlite_migrations")}
        prompts, rankings = (
            database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            for table in ("prompts", "rankings")
        )
    return steps, (prompts, rankings)


@pytest.mark.slow
def test_an_upgrade_brings_an_earlier_database_to_its_schema(
    wheel: Path, service: dict[str, str], tmp_path: Path
) -> None:
    """One of the first 13 steps, which the version of commit e4a9715 has left."""
    database = Path(service["DB"])
    stop = [str(tmp_path / "bin" / "systemctl"), "stop", "rlhf-label"]
    subprocess.run(stop, env=service, check=True)
    for part in ("", "-wal", "-shm"):
        Path(f"{database}{part}").unlink(missing_ok=True)
    with tarfile.open(ARCHIVE) as archive:
        content = archive.extractfile("./labels.db")
        assert content is not None
        database.write_bytes(content.read())
    earlier, rows = steps_and_rows(database)
    assert earlier == set(list(STEPS)[:13])
    assert rows == (12, 12)
    done = upgrade(wheel, service)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_and_rows(database) == (set(STEPS), rows)
    [copy] = Path(service["BACKUPS"]).iterdir()
    assert steps_and_rows(copy) == (earlier, rows)  # to go back to


@pytest.mark.slow
@pytest.mark.parametrize("ending", [STOPS, HANGS])
def test_an_upgrade_that_does_not_answer_is_rolled_back(
    ending: str, wheel: Path, service: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as other:
        for name in whole.namelist():
            content = whole.read(name)
            is_replaced = name == "labeling_app/web/serving.py"
            other.writestr(name, BROKEN.replace("ENDING", ending) if is_replaced else content)
    before = Path(service["ROOT"], "current").resolve()
    done = upgrade(broken, {**service, "WAIT": "40"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"does not answer at {service['URL']}: back to {before}" in done.stderr
    assert Path(service["ROOT"], "current").resolve() == before
    with sqlite3.connect(service["DB"]) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        assert database.execute("SELECT COUNT(*) FROM prompts").fetchone() == (3,)
    assert "of_the_new_version" not in tables
    [failed] = Path(service["DB"]).parent.glob("labels.db.failed-*[0-9Z]")
    with sqlite3.connect(failed) as database:
        assert database.execute("SELECT name FROM of_the_new_version").fetchall() == []
    with urllib.request.urlopen(service["URL"], timeout=60) as answer:
        assert answer.status == 200
