"""Tasks of a source go to the people it was given to, first and alone; others to everybody."""

import pytest
from sqlite_utils import Database

from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.files.migrations import migrations
from labeling_app.db.people.sources import give_source, sources_with_people
from labeling_app.db.queue import Submission
from labeling_app.db.store import Store
from rlhf.records.schema import Message, Prompt
from tests.labeling_app.conftest import build_responses


def add(store: Store, source: str, number: int) -> None:
    """A prompt of a source, with two responses: a task."""
    messages = (Message(role="user", content=f"{source} {number}"),)
    prompt = Prompt.create(messages, "train", source)
    store.add_prompts([prompt])
    store.add_responses(build_responses(prompt, ["a", "b"]))


@pytest.fixture
def work(store, queue):
    """Rank what comes until nothing is left: the prompts in their order."""
    for name in ("ann", "bob"):
        queue.add_annotator(name)

    def run(name: str, most: int = 99) -> list[str]:
        seen = []
        while len(seen) < most and (task := queue.next_task(name)):
            seen.append(task.messages[0]["content"])
            sent = Submission(id=f"{name} {task.id}", task_id=task.id, tiers=((0,), (1,)))
            queue.submit(name, sent)
        return seen

    return run


def test_a_source_goes_to_its_people_alone_and_first(store, queue, work):
    for source in ("news", "law"):
        for number in range(2):
            add(store, source, number)
    give_source(store.connections, "law", ["ann"])
    add(store, "law", 2)  # also what comes later
    assert sources_with_people(store.connections) == {"law": ["ann"], "news": []}
    assert work("bob", 1) == ["news 0"]
    assert work("ann", 4) == ["law 0", "law 1", "law 2", "news 1"]
    assert work("bob") == []
    assert queue.busy_elsewhere("bob") == (0, None)


def test_a_task_of_others_is_not_announced(store, queue, work):
    add(store, "law", 0)
    give_source(store.connections, "law", ["ann"])
    assert queue.next_task("ann")
    assert queue.busy_elsewhere("bob") == (0, None)
    give_source(store.connections, "law", ["ann", "bob"])
    assert queue.busy_elsewhere("bob")[0] == 1


def test_several_people_share_a_source_until_it_is_everybodys_again(store, queue, work):
    set_overlap(store.connections, 2)
    add(store, "law", 0)
    add(store, "law", 1)
    queue.add_annotator("eve")
    give_source(store.connections, "law", ["ann", "bob"])
    assert work("eve") == []
    assert work("ann") == ["law 0", "law 1"]
    assert work("bob", 1) == ["law 0"]
    give_source(store.connections, "law", [])
    assert sources_with_people(store.connections) == {"law": []}
    assert work("eve") == ["law 1"]


def test_of_ones_own_sources_the_highest_priority_comes_first(store, work):
    for source in ("art", "law", "news"):
        add(store, source, 0)
        give_source(store.connections, source, ["ann"])
    with store.connections.write() as db:
        db.execute("UPDATE tasks SET priority = id % 3")  # 1, 2, 0
    assert work("ann") == ["law 0", "art 0", "news 0"]


def test_the_queue_is_read_from_its_first_entry_on(store, queue, work):
    for number in range(20):
        add(store, "law", number)
        add(store, "news", number)
    give_source(store.connections, "law", ["ann"])
    db, seen = store.connections.db, []
    db.conn.set_trace_callback(seen.append)
    queue.next_task("ann")
    queue.next_task("bob")
    db.conn.set_trace_callback(None)
    asked = [one for one in seen if one.lstrip().startswith(("SELECT", "UPDATE"))]
    plans = {row[3] for one in asked for row in db.execute(f"EXPLAIN QUERY PLAN {one}")}
    assert "SEARCH t USING INDEX tasks_reserved (reserved=?)" in plans
    scans = {one for one in plans if one.startswith(("SCAN", "USE TEMP B-TREE"))}
    assert scans <= {"SCAN t USING INDEX tasks_open", "SCAN totals"}


def test_tasks_of_an_older_database_are_everybodys(store, work, tmp_path):
    add(store, "law", 0)
    store.close()
    old = Database(tmp_path / "labels.db")
    for statement in (
        "DROP TRIGGER reserve_new_tasks",
        "DROP INDEX tasks_open",
        "DROP INDEX tasks_reserved",
        "ALTER TABLE tasks DROP COLUMN reserved",
        "DROP INDEX prompts_of_source",
        "DROP TABLE source_people",
        "CREATE INDEX tasks_open ON tasks (priority DESC, id)",
        "DELETE FROM _sqlite_migrations WHERE name = '018_sources'",
    ):
        old.execute(statement)
    old.conn.commit()
    assert migrations.pending(old)
    old.close()
    with Store(tmp_path / "labels.db") as opened:
        assert sources_with_people(opened.connections) == {"law": []}
        query = "SELECT reserved FROM tasks"
        assert opened.connections.db.execute(query).fetchall() == [(None,)]
