"""The labeling app as a service: its units, the proxy in front of it, backups and upgrades."""

import configparser
import json
import os
import re
import shlex
import shutil
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from rlhf.cli import main
from tests.examples.deploy.conftest import Installed
from tests.examples.deploy.serving import running
from tests.servers.commands import REPOSITORY, free_port
from tests.servers.local import LocalServer

DEPLOY = REPOSITORY / "examples" / "deploy"
UNITS = ("rlhf-label.service", "rlhf-backup.service", "rlhf-backup.timer")
RLHF, BACKUP, CURRENT = "/opt/rlhf/current/bin/rlhf", "/opt/rlhf/backup.sh", "/opt/rlhf/current"
PASSWORD = "long enough"
NGINX = """
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""
# systemctl for one service, which runs whatever version is current
SYSTEMCTL = """#!/usr/bin/env bash
cd "$STATE"
case $1 in
start) nohup "$ROOT/current/bin/rlhf" label --db "$DB" --port "$PORT" >>log 2>&1 & echo $! >pid ;;
stop) kill "$(cat pid)" 2>/dev/null; timeout 60 tail --pid="$(cat pid)" -f /dev/null ;;
esac
"""
BROKEN = """
import sqlite3

def serve(db, *options):
    with sqlite3.connect(db) as connection:
        connection.execute("CREATE TABLE of_the_new_version (name TEXT)")
    raise SystemExit("this version does not start")

BoardOptions = LiveOptions = dict
"""


def unit(name: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str
    parsed.read(DEPLOY / name)
    return parsed


def require_command(words: list[str]) -> None:
    """The words of an rlhf command are known to it."""
    assert main([*words, "--dry-run"]) == 0, words


def label_database(path: Path) -> Path:
    lines = [json.dumps({"prompt": f"question {n}", "responses": ["a", "b"]}) for n in range(3)]
    source = path.with_suffix(".jsonl")
    source.write_text("\n".join(lines))
    assert main(["import", str(source), "--db", str(path)]) == 0
    return path


def test_the_units_are_what_systemd_reads(tmp_path: Path) -> None:
    service = unit("rlhf-label.service")["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == RLHF
    require_command(words)
    assert str(Path(words[2]).parent) == service["ReadWritePaths"] == service["WorkingDirectory"]
    script, database, folder = shlex.split(unit("rlhf-backup.service")["Service"]["ExecStart"])
    assert (script, database) == (BACKUP, words[2])
    assert folder in unit("rlhf-backup.service")["Service"]["ReadWritePaths"].split()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    for name in UNITS:  # it looks for the programs: name some that are here
        text = (DEPLOY / name).read_text().replace(RLHF, sys.executable)
        (tmp_path / name).write_text(text.replace(BACKUP, str(DEPLOY / "backup.sh")))
    places = [str(tmp_path / name) for name in UNITS]
    verify = ["systemd-analyze", "verify", "--man=no", *places]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_canary_runs_every_night() -> None:
    job = yaml.safe_load((DEPLOY / "canary.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # a job's may not be Always
    [container] = pod["containers"]
    assert container["command"] == ["rlhf"]
    require_command(container["args"])
    assert int(container["args"][-1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    lines = (DEPLOY / "canary.cron").read_text().splitlines()
    [line] = [one for one in lines if RLHF in one]
    schedule, user, command = line.split()[:5], line.split()[5], line.split(maxsplit=6)[6]
    assert " ".join(schedule) == job["spec"]["schedule"]
    assert user == unit("rlhf-label.service")["Service"]["User"]
    assert "%" not in command  # cron would read a new line
    require_command(shlex.split(command.partition(" >")[0])[4:])


def test_logs_that_are_written_are_rotated() -> None:
    written = set(re.findall(r"_log (\S+);", (DEPLOY / "nginx.conf").read_text()))
    rotated = (DEPLOY / "logrotate.conf").read_text().partition("{")[0]
    assert written == set(re.findall(r"^(/\S+) (/\S+) ", rotated, re.MULTILINE)[0])


def test_the_page_names_every_file() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in DEPLOY.iterdir() if path.name not in page + "README.md"]


def test_a_backup_is_made_and_the_oldest_goes(tmp_path: Path) -> None:
    database = label_database(tmp_path / "labels.db")
    program, folder = tmp_path / "rlhf", tmp_path / "backups"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} {sys.executable} -m rlhf.cli "$@"\n')
    program.chmod(0o755)
    folder.mkdir()
    for day in (1, 2, 3):
        (folder / f"labels-2026010{day}T000000Z.db").touch()
    subprocess.run(
        [str(DEPLOY / "backup.sh"), str(database), str(folder)],
        env={**os.environ, "RLHF": str(program), "KEEP": "2"},
        check=True,
        capture_output=True,
    )
    kept, new = sorted(folder.iterdir())
    assert kept.name == "labels-20260103T000000Z.db"
    with sqlite3.connect(new) as copy:
        assert copy.execute("SELECT COUNT(*) FROM prompts").fetchone() == (3,)


class Recorder(BaseHTTPRequestHandler):
    """Remembers the headers of requests."""

    def do_GET(self) -> None:
        self.server.seen.append(self.headers)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def write_proxy(folder: Path, app_port: int) -> tuple[list[str], int, int]:
    """nginx with our configuration on free ports: its command, and its https and http ports."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    https, http = free_port(), free_port()
    site = (DEPLOY / "nginx.conf").read_text()
    for ours, theirs in {
        "listen 443 ssl": f"listen 127.0.0.1:{https} ssl",
        "listen 80": f"listen 127.0.0.1:{http}",
        "/etc/letsencrypt/live/label.example.org/fullchain.pem": str(certificate),
        "/etc/letsencrypt/live/label.example.org/privkey.pem": str(key),
        "/var/log/nginx": str(folder),
        "label.example.org": "localhost",
        "127.0.0.1:7860": f"127.0.0.1:{app_port}",
    }.items():
        assert ours in site, ours
        site = site.replace(ours, theirs)
    (folder / "site.conf").write_text(site)
    user = Path("/proc/self").owner()
    (folder / "nginx.conf").write_text(NGINX.format(user=user, folder=folder))
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    return [program, "-c", str(folder / "nginx.conf"), "-g", "daemon off;"], https, http


@pytest.fixture
def nginx() -> None:
    if not (shutil.which("nginx") or Path("/usr/sbin/nginx").is_file()):
        pytest.skip("no nginx: run `make proxy`")


@pytest.mark.slow
@pytest.mark.usefixtures("nginx")
def test_what_a_client_claims_of_itself_never_reaches_the_app(tmp_path: Path) -> None:
    with LocalServer(Recorder) as app:
        app.seen = []
        command, https, http = write_proxy(tmp_path, app.server_port)
        url = f"https://localhost:{https}/"
        with running(command, url, dict(os.environ), tmp_path):
            context = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
            app.seen.clear()
            claims = {"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "http"}
            request = urllib.request.Request(url, headers=claims)
            with urllib.request.urlopen(request, context=context) as answer:
                assert "max-age" in answer.headers["Strict-Transport-Security"]
            [headers] = app.seen
            assert headers.get_all("X-Forwarded-For") == ["127.0.0.1"]
            assert headers.get_all("X-Forwarded-Proto") == ["https"]
            assert headers["Host"] == f"localhost:{https}"
            with closing(HTTPConnection("127.0.0.1", http)) as plain:
                plain.request("GET", "/board", headers={"Host": "localhost"})
                with plain.getresponse() as moved:
                    assert moved.status == 301
                    assert moved.headers["Location"] == "https://localhost/board"


@pytest.mark.slow
@pytest.mark.usefixtures("nginx")
def test_people_sign_in_through_the_proxy(tmp_path: Path, monkeypatch) -> None:
    database = label_database(tmp_path / "labels.db")
    add = ["users", "add", "ann", "--db", str(database), "--password-stdin"]
    program = [sys.executable, "-m", "rlhf.cli"]
    home = {"cwd": REPOSITORY, "check": True, "text": True}
    subprocess.run([*program, *add], input=f"{PASSWORD}\n", **home)
    service = configparser.ConfigParser(strict=False, interpolation=None)
    service.read(DEPLOY / "rlhf-label.service")
    allowed = re.findall(r"^Environment=(FORWARDED_ALLOW_IPS)=(.+)$",
                         (DEPLOY / "rlhf-label.service").read_text(), re.MULTILINE)  # fmt: skip
    environment = {**os.environ, **dict(allowed)}
    port = free_port()
    words = shlex.split(unit("rlhf-label.service")["Service"]["ExecStart"])[1:]
    words = [str(database) if one.endswith(".db") else one for one in words]
    words[words.index("--port") + 1] = str(port)
    command, https, _ = write_proxy(tmp_path, port)
    own = f"http://127.0.0.1:{port}"
    with (
        running([*program, *words], f"{own}/healthz", environment, REPOSITORY),
        running(command, f"https://localhost:{https}/healthz", environment, tmp_path),
    ):
        cookie = sign_in(f"https://localhost:{https}", tmp_path / "certificate.pem")
        assert {"Secure", "HttpOnly"} <= set(cookie.split("; "))
        # a program that is not the proxy claims that its user came by https
        claims = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"}
        direct = HTTPConnection("127.0.0.1", port, source_address=("127.0.0.2", 0))
        body = urlencode({"name": "ann", "password": PASSWORD})
        with closing(direct) as other:
            other.request("POST", "/sign-in", body, claims)
            with other.getresponse() as answer:
                assert "Secure" not in answer.headers["Set-Cookie"].split("; ")


def sign_in(address: str, certificate: Path) -> str:
    """Sign in and open the board with the cookie; the cookie as it was set."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    context = ssl.create_default_context(cafile=str(certificate))
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), Stay())
    body = urlencode({"name": "ann", "password": PASSWORD}).encode()
    form = urllib.request.Request(f"{address}/sign-in", body, {"Origin": address})
    with pytest.raises(urllib.error.HTTPError) as sent:
        opener.open(form)
    assert (sent.value.code, sent.value.headers["Location"]) == (303, "/")
    sent.value.close()
    cookie: str = sent.value.headers["Set-Cookie"]
    board = urllib.request.Request(address, headers={"Cookie": cookie.partition(";")[0]})
    with opener.open(board) as page:
        assert page.status == 200
    return cookie


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


@pytest.mark.slow
def test_an_upgrade_that_does_not_start_is_rolled_back(
    wheel: Path, service: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as other:
        for name in whole.namelist():
            content = whole.read(name)
            other.writestr(name, BROKEN if name == "labeling_app/web/serving.py" else content)
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
