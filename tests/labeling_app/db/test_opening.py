"""Opening a database brings an older one up to date, once, and waits for who is at it."""

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from sqlite3 import OperationalError

import pytest
from sqlite_utils import Database

from labeling_app.annotators.rounds import queue_round
from labeling_app.db.files.migrations import migrations
from labeling_app.db.files.schema import STEPS
from labeling_app.db.rankings import num_done
from labeling_app.db.rounds import rounds
from labeling_app.db.store import Store
from rlhf.diagnose import diagnose
from rlhf.errors import InputError, InterruptedRunError
from tests.labeling_app.conftest import build_ranking as ranking


def test_a_database_from_before_scores_opens(tmp_path, make_prompt, make_responses):
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    db = Database(tmp_path / "old.db")
    migrations.apply(db, stop_before="010_scores")
    db.execute("INSERT INTO annotators VALUES ('ann', 'human', 0)")
    row = [json.dumps([message.__dict__ for message in prompt.messages])]
    db.execute("INSERT INTO prompts VALUES (1, ?, ?, 'train', 'test', 0)", [prompt.id, *row])
    for response in (first, second):
        db["responses"].insert(
            {"id": response.id, "prompt_id": prompt.id, "text": response.text, "model": "m",
             "sample_index": 0, "created_at": 0}
        )  # fmt: skip
    tiers = json.dumps([[first.id], [second.id]])
    db["rankings"].insert(
        {"id": "old", "prompt_id": prompt.id, "annotator": "ann", "tiers": tiers, "created_at": 0}
    )
    db.close()
    new = ranking(prompt.id, [[second.id], [first.id]], id="new", scores=(2, 1))
    with Store(tmp_path / "old.db") as store:
        store.add_rankings([new])
        [record] = store.ranked_prompts()
    assert record.rankings == (ranking(prompt.id, [[first.id], [second.id]], id="old"), new)


def test_an_older_database_counts_anew_what_is_open_to_everybody(tmp_path):
    db = Database(tmp_path / "old.db")
    migrations.apply(db, stop_before="011_open_to_everybody")
    db.execute("INSERT INTO prompts VALUES (1, 'p', '[]', 'train', 'test', 0)")
    add = "INSERT INTO tasks (prompt_id, responses, created_at, purpose, open, only_for)"
    for purpose, wanted, only_for in (
        ("rank", 2, None),
        ("compare", 1, None),
        ("rank", 0, None),
        ("rank", 1, "lea"),
        ("repeat", 1, "ann"),
        ("gold", 1_000_000, None),
        ("training", 1_000_000, None),
    ):
        db.execute(f"{add} VALUES ('p', '[]', 0, ?, ?, ?)", [purpose, wanted, only_for])
    query = "SELECT value FROM totals WHERE name = 'open'"
    assert db.execute(query).fetchone() == (6,)
    db.close()
    with Store(tmp_path / "old.db") as store:
        assert (store.counts()["tasks"], store.counts()["open"]) == (7, 2)
        for change, left in (
            ("purpose = 'gold' WHERE id = 1", 1),
            ("only_for = 'ann' WHERE id = 2", 0),
            ("open = open + 1 WHERE id IN (3, 4, 6)", 1),
            ("open = 2 WHERE id = 3", 1),
        ):
            store.connections.db.execute(f"UPDATE tasks SET {change}")
            assert store.counts()["open"] == left


def test_rounds_of_an_older_database_get_a_table_and_their_tasks(
    tmp_path, make_prompt, make_responses
) -> None:
    prompt, other = make_prompt("How?"), make_prompt("Why?")
    first, second = make_responses(prompt, ["one", "two"])
    db = Database(tmp_path / "old.db")
    migrations.apply(db, stop_before="014_rounds")
    old = {"policy": {"path": "p", "hash": "h"}, "settings": {"samples": 2}, "at": 5.5}
    later = {"policy": {"path": "q", "hash": "i"}, "settings": {}, "at": 6.5}
    for number, content in ((2, later), (1, old)):
        db["settings"].insert({"name": f"round {number}", "value": json.dumps(content)})
    for p in (prompt, other):
        messages = json.dumps([{"role": m.role, "content": m.content} for m in p.messages])
        db["prompts"].insert(
            {"id": p.id, "messages": messages, "split": "train", "source": "test", "created_at": 0}
        )
    for purpose, reason in (
        ("rank", "round 2: fisher 0.5"),
        ("rank", "random"),
        ("training", "round 1: numbers are rounded"),  # an explanation, by chance in these words
        ("rank", "round 7: of no round that there was"),
        ("rank", "round"),
    ):
        db["tasks"].insert(
            {"prompt_id": prompt.id, "responses": json.dumps([first.id, second.id]), "open": 1,
             "purpose": purpose, "reason": reason, "created_at": 0}
        )  # fmt: skip
    db.close()
    with Store(tmp_path / "old.db") as store:
        assert rounds(store.connections) == {1: old, 2: later}
        read = store.connections.db.execute
        tasks = read("SELECT round_id, reason FROM tasks ORDER BY id").fetchall()
        assert tasks == [
            (2, "round 2: fisher 0.5"),
            (None, "random"),
            (None, "round 1: numbers are rounded"),
            (None, "round 7: of no round that there was"),
            (None, "round"),
        ]
        names = {name for (name,) in read("SELECT name FROM settings")}
        assert names == {"board", "secret"}
        # The same policy goes on with its round; a new one gets the next number.
        chosen = [(prompt, (first, second), "again")]
        assert queue_round(store, {"policy": old["policy"]}, chosen, {}) == {
            "round": 1, "queued": 0,
        }  # fmt: skip
        answers = make_responses(other, ["three", "four"])
        assert queue_round(
            store, {"policy": {"path": "r", "hash": "j"}}, [(other, answers, "new")], {}
        ) == {"round": 3, "queued": 1}
        assert list(rounds(store.connections)) == [1, 2, 3]


def test_two_processes_opening_at_once_migrate_once(tmp_path: Path):
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(Store, [tmp_path / "new.db"] * 6))
    applied = migrations.applied(stores[0].connections.db)
    assert [m.name for m in applied] == [m.name for m in migrations._migrations]
    for opened in stores:
        opened.close()


def test_opening_waits_for_somebody_else_who_opens_the_new_file(tmp_path: Path):
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, other.execute, ["COMMIT"])
    timer.start()
    with Store(path) as store:
        assert store.counts()["prompts"] == 0
        [mode] = store.connections.db.execute("PRAGMA journal_mode").fetchone()
    timer.join()
    other.close()
    assert mode == "wal"


def test_readers_open_what_another_program_writes_for_a_long_time(store, monkeypatch):
    monkeypatch.setattr("labeling_app.db.connection.BUSY_TIMEOUT_SECONDS", 0.1)
    with store.connections.write(), Store(store.connections.path) as other:
        assert other.counts()["prompts"] == 0
        with pytest.raises(OperationalError) as caught:
            other.add_rubric("Be kind.")
    found = diagnose(caught.value)
    assert isinstance(found, InterruptedRunError)
    assert "Another program has been writing to the database for a long time" in found.problem
    assert "run the same command again" in found.remedy


def test_a_new_file_that_another_program_keeps_to_itself_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("labeling_app.db.connection.BUSY_TIMEOUT_SECONDS", 0.1)
    with closing(sqlite3.connect(tmp_path / "new.db")) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(InterruptedRunError, match="Another program has been writing"):
            Store(tmp_path / "new.db")


def test_a_database_inside_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be used as a label database"):
        Store(tmp_path / "file" / "labels.db")


def test_a_migration_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch):
    broken = ("CREATE TABLE half (a)", "THIS IS NOT SQL")
    monkeypatch.setitem(STEPS, "001_first_schema", broken)
    with pytest.raises(InputError, match="syntax error"):
        Store(tmp_path / "new.db")
    db = Database(tmp_path / "new.db")
    assert "half" not in db.table_names()
    db.close()


def test_an_older_database_counts_what_everybody_has_done(tmp_path):
    db = Database(tmp_path / "old.db")
    migrations.apply(db, stop_before="022_own_work")
    for name in ("ann", "bob"):
        db.execute("INSERT INTO annotators VALUES (?, 'human', 0)", [name])
    db.execute("INSERT INTO prompts VALUES (1, 'p', '[]', 'train', 'test', 0, 0)")
    for _ in range(3):
        db["tasks"].insert({"prompt_id": "p", "responses": "[]", "open": 1, "created_at": 0})
    made = {"prompt_id": "p", "annotator": "ann", "tiers": "[]", "created_at": 0}
    for number, (task_id, live) in enumerate(((1, 1), (2, 1), (3, 0), (None, 1))):
        db["rankings"].insert({"id": str(number), "task_id": task_id, "live": live, **made})
    db.close()
    with Store(tmp_path / "old.db") as store:
        assert [num_done(store.connections, name) for name in ("ann", "bob")] == [2, 0]
