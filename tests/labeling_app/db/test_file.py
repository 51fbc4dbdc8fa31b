"""The file: nobody else's is touched, readers leave ours alone, a lost one takes nothing."""

import json
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import FastAPI
from sqlite_utils import Database
from sqlite_utils.migrations import Migrations
from starlette.testclient import TestClient

from labeling_app.data_io.tokens import make_token
from labeling_app.db.connection import Connections
from labeling_app.db.files.migrations import migrations
from labeling_app.db.files.schema import APPLICATION_ID
from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board
from labeling_app.web.health import add_health
from labeling_app.web.programs.feedback_route import add_feedback_route
from labeling_app.web.serving import BoardOptions, LiveOptions, serve
from rlhf.cli import main
from rlhf.diagnose import diagnose
from rlhf.errors import InputError
from tests.labeling_app.asking import ask


def make_other_database(path: Path, journal: str) -> dict[str, bytes]:
    """A database of another program; returns what is in its folder."""
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.execute("CREATE TABLE invoices (id INTEGER)")
        db.execute("INSERT INTO invoices VALUES (7)")
        db.commit()
    return content_of(path.parent)


def content_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


COMMANDS = [
    ["export", "--out", "OUT"],
    ["trace", "some-id"],
    ["backup", "--out", "OUT"],
    ["users", "list"],
    ["users", "add", "ann"],
    ["users", "token", "shop"],
    ["import", "LINES"],
    ["label"],
    ["generate", "--model", "none"],
    ["annotate", "--annotator", "signal:math:fsum"],
    ["prioritize", "--reward", "none"],
    ["round", "--policy", "p", "--reference", "r", "--reward", "signal:math:fsum"],
]


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_of_another_program_is_refused_and_left_as_it_is(
    tmp_path, refused, command, journal
):
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"prompt": "Hi?"}))
    folder = tmp_path / "theirs"
    folder.mkdir()
    path = folder / "other.sqlite"
    before = make_other_database(path, journal)
    places = {"OUT": str(tmp_path / "out"), "LINES": str(lines)}
    words = refused(*(places.get(word, word) for word in command), "--db", path)
    assert "is a database of another program (its tables: invoices); it was left as it is" in words
    assert "Give --db the path of a database made by `rlhf import`, or of a new file." in words
    assert content_of(folder) == before
    assert not (tmp_path / "out").exists()


def test_live_mode_alone_leaves_a_database_of_another_program_as_it_is(tmp_path):
    before = make_other_database(tmp_path / "other.sqlite", "wal")
    with pytest.raises(InputError, match="is a database of another program"):
        serve(
            tmp_path / "other.sqlite",
            BoardOptions(port=9, annotator="ann"),
            LiveOptions(models=[object()]),
        )
    assert content_of(tmp_path) == before


def test_what_another_program_has_not_moved_into_its_file_yet_is_seen(tmp_path):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE invoices (id INTEGER)")
        assert path.stat().st_size == 4096  # the table is in the log alone
        with pytest.raises(InputError, match="its tables: invoices"):
            Store(path)
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("invoices",)]


def test_a_database_with_migrations_of_another_program_is_not_taken_for_ours(tmp_path):
    theirs = Migrations("notes")
    theirs(name="001")(lambda db: db.execute("CREATE TABLE notes (text TEXT)"))
    db = Database(tmp_path / "notes.db")
    theirs.apply(db)
    db.close()
    before = content_of(tmp_path)
    with pytest.raises(InputError, match="its tables: _sqlite_migrations, notes"):
        Store(tmp_path / "notes.db")
    assert content_of(tmp_path) == before


def test_a_new_database_says_in_its_header_whose_it_is(store):
    assert store.connections.db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert APPLICATION_ID.to_bytes(4, "big") == b"RLHF"


def test_readers_say_what_to_do_with_an_empty_file(tmp_path, refused):
    path = tmp_path / "labels.db"
    path.touch()
    for command in (["export", "--out", "x"], ["users", "list"], ["backup", "--out", "x"]):
        words = refused(*command, "--db", path)
        assert f"{path} is empty Begin with: rlhf import prompts.jsonl --db" in words
    assert content_of(tmp_path) == {"labels.db": b""}


def rank_one(store: Store) -> None:
    queue = TaskQueue(store)
    queue.add_annotator("ann")
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    ask(board, "ann", submission(task))


def submission(task: dict, id: str = "u1") -> dict:
    return {"op": "submit", "id": id, "ticket": task["ticket"], "tiers": [[0], [1]]}


def read_everything(path: Path, folder: Path) -> None:
    assert main(["export", "--db", str(path), "--out", str(folder / "out")]) == 0
    assert main(["trace", "u1", "--db", str(path)]) == 0
    assert main(["users", "list", "--db", str(path)]) == 0
    assert main(["backup", "--db", str(path), "--out", str(folder / "copy.db")]) == 0


def test_readers_leave_the_file_as_it_is(store, fill, tmp_path):
    fill(1, 2)
    rank_one(store)
    path = tmp_path / "apart" / "labels.db"
    path.parent.mkdir()
    store.connections.db.execute("VACUUM INTO ?", [str(path)])
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    before = path.read_bytes()
    path.chmod(0o444)
    read_everything(path, tmp_path)
    assert path.read_bytes() == before
    with (
        Store(path, read_only=True) as reader,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        reader.add_rubric("Be kind.")


def test_readers_take_an_older_database_and_leave_it_to_the_older_version(store, fill, tmp_path):
    fill(1, 2)
    rank_one(store)
    path = tmp_path / "apart" / "old.db"
    path.parent.mkdir()
    old = Database(path)
    migrations.apply(old, stop_before="013_tickets")
    old.attach("full", store.connections.path)
    for table in ("prompts", "responses", "annotators", "tasks", "assignments", "rankings"):
        columns = ", ".join(old[table].columns_dict)
        old.execute(f"INSERT INTO {table} SELECT {columns} FROM full.{table}")
    old.conn.commit()
    old.close()
    before = path.read_bytes()
    read_everything(path, tmp_path)
    assert path.read_bytes() == before
    assert (tmp_path / "out" / "train.jsonl").read_text().count("\n") == 1
    with Store(path) as writer:
        assert writer.connections.db["tickets"].count == 1


# ------------------------------------------------------------------ a file that is lost


def remove(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def replace_it(path: Path) -> None:
    shutil.copy(path, path.with_name("other.db"))
    remove(path)
    path.with_name("other.db").rename(path)


def put_back(path: Path) -> None:
    path.with_name("moved.db").replace(path)


GONE = "its file was removed or replaced since it was opened"


@pytest.mark.parametrize("lose", [remove, replace_it])
def test_nothing_is_taken_while_the_file_is_gone_and_all_of_it_afterwards(store, queue, fill, lose):
    fill(2, 2)
    queue.add_annotator("ann")
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    lose(store.connections.path)
    draft = {"op": "draft", "ticket": task["ticket"], "state": {"note": "half done"}}
    for payload in (submission(task), draft, {"op": "next"}):
        answer = ask(board, "ann", payload)
        assert (answer["ok"], answer["retry"]) == (False, True)
        assert answer["error"] == f"The database could not write ({GONE}). Your draft is kept."
    put_back(store.connections.path)
    assert ask(board, "ann", draft)["ok"]
    assert ask(board, "ann", submission(task))["done"] == 1
    with Store(store.connections.path, read_only=True) as reader:
        assert reader.counts()["rankings"] == 1


def test_a_file_that_is_emptied_or_loses_its_log_takes_nothing(store, tmp_path):
    log = store.connections.path.with_name("labels.db-wal")
    log.rename(tmp_path / "moved-wal")
    with pytest.raises(sqlite3.OperationalError, match=GONE):
        store.add_rubric("Be kind.")
    (tmp_path / "moved-wal").rename(log)
    assert store.add_rubric("Be kind.")
    os.truncate(store.connections.path, 0)
    with pytest.raises(sqlite3.OperationalError, match=GONE):
        store.add_rubric("Be true.")


def test_what_was_written_while_the_file_went_away_is_not_called_stored(store):
    def write_and_lose() -> None:
        with store.connections.write() as db:
            db.execute("INSERT INTO settings VALUES ('a', 'b')")
            remove(store.connections.path)

    with pytest.raises(sqlite3.OperationalError, match=GONE):
        write_and_lose()


def test_a_command_that_loses_its_file_says_so(store):
    remove(store.connections.path)
    with pytest.raises(sqlite3.OperationalError) as caught:
        store.add_rubric("Be kind.")
    found = diagnose(caught.value)
    assert isinstance(found, InputError)
    assert found.problem == f"The database that --db names cannot be written: {GONE}"
    assert found.remedy.startswith("Put its file back")


def test_programs_are_asked_to_send_it_later(store):
    app = FastAPI()
    add_feedback_route(app, store)
    add_health(app, store.connections)
    headers = {"authorization": f"Bearer {make_token(store, 'shop')}"}
    thumb = {"id": "f", "prompt": "Hi?", "response": "Hello!", "thumbs": "up"}
    with TestClient(app) as client:
        remove(store.connections.path)
        answer = client.post("/feedback", json=thumb, headers=headers)
        assert answer.status_code == 503
        assert answer.json()["error"] == f"The database cannot be used ({GONE}). Try again later."
        assert not store.connections.path.exists()  # no empty file was made in its place
        put_back(store.connections.path)
        assert client.post("/feedback", json=thumb, headers=headers).status_code == 201


def test_the_thread_that_opened_a_database_may_end(tmp_path):
    made: list[Connections] = []
    opening = threading.Thread(target=lambda: made.append(Connections(tmp_path / "new.db")))
    opening.start()
    opening.join()
    with made[0].write() as db:  # its log is still the one that was watched
        db.execute("INSERT INTO settings VALUES ('a', 'b')")
    made[0].close()
