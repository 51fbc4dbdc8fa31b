"""`/healthz` and the start of the app: a database that is not whole is served to nobody."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from labeling_app.db.files.label_file import FileWatch
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board
from labeling_app.web.health import Health, add_health
from tests.labeling_app.asking import ask


def damage(path: Path, page: int = -1) -> None:
    """Overwrite a page of the file, as a failing disk does."""
    pages = path.stat().st_size // 4096
    with path.open("r+b") as stream:
        stream.seek(4096 * (page % pages))
        stream.write(b"\xff" * 4096)


@pytest.fixture
def full(store, queue, fill) -> Store:
    fill(40, 2)
    queue.add_annotator("ann")
    store.connections.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return store


@pytest.fixture
def client(full):
    app = FastAPI()
    add_health(app, full.connections)
    with TestClient(app) as opened:
        yield opened


def test_health_follows_the_file(client, full):
    assert client.get("/healthz").json() == {"status": "ok"}
    path = full.connections.path
    path.rename(path.with_name("moved.db"))
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json() == {
        "status": "failed", "problem": "its file was removed or replaced since it was opened",
    }  # fmt: skip
    assert str(path) not in answer.text
    path.with_name("moved.db").rename(path)
    assert client.get("/healthz").status_code == 200


def expire_last_check(health: Health) -> None:
    health._next_check = 0.0


def test_a_file_that_another_program_locks_is_not_damaged(client, full, monkeypatch):
    path = full.connections.path
    full.connections.close()  # nobody else may have it open; SQLite removes its log
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(full.connections, "_watch", FileWatch(path))  # of the new log
        answer = client.get("/healthz")
    assert answer.status_code == 503
    assert "locked" in answer.json()["problem"]
    assert not full.connections.damage


def test_damage_is_found_and_ends_all_writing(full, queue):
    board, health = Board(full, queue), Health(full.connections)
    assert health.problem() == ""
    damage(full.connections.path)
    expire_last_check(health)
    assert health.problem().startswith("its file is damaged (")
    answer = ask(board, "ann", {"op": "next"})
    assert (answer["ok"], answer["retry"]) == (False, True)
    assert "could not write (its file is damaged (" in answer["error"]
    with pytest.raises(sqlite3.OperationalError, match="its file is damaged"):
        full.add_rubric("Be kind.")


def test_another_database_in_the_same_file_is_found(full, tmp_path):
    health = Health(full.connections)
    with Store(tmp_path / "other.db") as other:
        other.connections.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    inode = full.connections.path.stat().st_ino
    shutil.copyfile(tmp_path / "other.db", full.connections.path)
    assert full.connections.path.stat().st_ino == inode
    assert "another database was copied over its file" in health.problem()


def test_looking_takes_a_small_part_of_the_time(full, monkeypatch):
    looks = []
    monkeypatch.setattr(
        "labeling_app.web.health.find_damage", lambda path: looks.append(path) or ""
    )
    clock = iter([0.0, 0.0, 1.0, 5.0, 20.9, 21.1, 21.1, 21.2])
    monkeypatch.setattr("labeling_app.web.health.monotonic", lambda: next(clock))
    health = Health(full.connections)
    for expected in (1, 1, 1, 2):  # one second of looking, then nineteen and more of rest
        assert health.problem() == ""
        assert len(looks) == expected


@pytest.mark.parametrize("size", [None, 5000])
def test_a_damaged_file_is_not_served(full, refused, size):
    path = full.connections.path
    full.close()
    if size:
        os.truncate(path, size)
    else:
        damage(path)
    words = refused("label", "--db", path)
    assert f"{path} is damaged (" in words or f"{path} cannot be used as a label database" in words
