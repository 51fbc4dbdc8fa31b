"""Tasks of a source go to the people and teams it was given to, first and alone."""

import json

import pytest
from sqlite_utils import Database

from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.files.migrations import migrations
from labeling_app.db.people.sources import (
    Receivers,
    find_sources,
    give_source,
    receivers_of,
)
from labeling_app.db.people.teams import all_teams
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


def given(store: Store) -> dict[str, Receivers]:
    return receivers_of(store.connections, find_sources(store.connections))


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
    assert given(store) == {"law": Receivers(people=("ann",)), "news": Receivers()}
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
    assert given(store) == {"law": Receivers()}
    assert work("eve") == ["law 1"]


def test_a_team_gets_a_source_also_who_joins_later_and_not_who_has_left(store, queue, work):
    users = Users(store)
    for name in ("ann", "bob", "eve"):
        users.add(name, "annotator", "long enough")
    users.set_team("ann", "red")
    set_overlap(store.connections, 3)
    for number in range(2):
        add(store, "law", number)
    add(store, "news", 0)
    give_source(store.connections, "law", [], ["red"])
    add(store, "law", 2)  # also what comes later
    assert given(store)["law"] == Receivers(teams=("red",))
    assert work("bob") == ["news 0"]
    assert work("ann", 1) == ["law 0"]
    assert queue.next_task("ann").messages[0]["content"] == "law 1"
    assert queue.busy_elsewhere("bob") == (0, None)
    users.set_team("bob", "red")
    users.set_team("ann", "blue")
    assert work("bob") == ["law 0", "law 1", "law 2"]
    assert work("ann") == ["law 1", "news 0"]  # the one that was on the screen
    assert all_teams(store.connections) == {"blue": ["ann"], "red": ["bob"]}
    give_source(store.connections, "law", ["eve"])  # in the place of the team
    assert work("eve", 3) == ["law 0", "law 1", "law 2"]
    add(store, "law", 3)
    assert work("bob") == []


def test_who_is_named_and_in_the_team_gets_each_task_once(store, queue, work):
    users = Users(store)
    for name in ("ann", "bob"):
        users.add(name, "annotator", "long enough")
    users.set_team("ann", "red")
    add(store, "law", 0)
    give_source(store.connections, "law", ["ann"], ["red"])
    assert queue.next_task("ann")
    assert queue.busy_elsewhere("bob") == (0, None)
    users.set_team("bob", "red")
    assert queue.busy_elsewhere("bob")[0] == 1
    users.set_team("bob", "")
    assert all_teams(store.connections) == {"red": ["ann"]}
    users.set_team("ann", "")
    assert all_teams(store.connections) == {"red": []}  # which still has the source


def test_sources_are_found_by_a_part_of_their_name(store):
    for source in ("", "100%", "b_c", "News 1", "old NEWS", "z"):
        add(store, source, 0)
    find = store.connections
    assert find_sources(find) == ["", "100%", "News 1", "b_c", "old NEWS", "z"]
    assert find_sources(find, most=2) == ["", "100%"]
    assert find_sources(find, "news") == ["News 1", "old NEWS"]
    assert find_sources(find, "news", most=1) == ["News 1"]
    assert [find_sources(find, part) for part in ("%", "_", "nothing")] == [["100%"], ["b_c"], []]


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
    give_source(store.connections, "law", ["ann"], ["red"])
    Users(store).add("bob", "annotator", "long enough")
    Users(store).set_team("bob", "red")
    db, seen = store.connections.db, []
    db.conn.set_trace_callback(seen.append)
    queue.next_task("ann")
    queue.next_task("bob")
    db.conn.set_trace_callback(None)
    asked = [one for one in seen if one.lstrip().startswith(("SELECT", "UPDATE"))]
    plans = {row[3] for one in asked for row in db.execute(f"EXPLAIN QUERY PLAN {one}")}
    assert "SEARCH t USING INDEX tasks_reserved (reserved=? AND priority=? AND id>?)" in plans
    assert "SEARCH t USING INDEX tasks_reserved (reserved=? AND priority<?)" in plans
    scans = {one for one in plans if one.startswith(("SCAN", "USE TEMP B-TREE"))}
    assert scans <= {"SCAN totals"}


def test_tasks_of_an_older_database_are_everybodys(store, work, tmp_path):
    add(store, "law", 0)
    store.close()
    old = Database(tmp_path / "labels.db")
    for statement in (
        "DROP TRIGGER reserve_new_tasks",
        "DROP TRIGGER start_again",
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
        assert given(opened) == {"law": Receivers()}
        query = "SELECT reserved FROM tasks"
        assert opened.connections.db.execute(query).fetchall() == [(None,)]


def test_an_older_database_keeps_who_gets_what_and_has_no_teams(tmp_path):
    old = Database(tmp_path / "old.db")
    migrations.apply(old, stop_before="021_teams")
    messages = json.dumps([{"role": "user", "content": "law 0"}])
    for statement in (
        "INSERT INTO annotators VALUES ('ann', 'human', 0), ('bob', 'human', 0)",
        "INSERT INTO users (name, role, password, epoch, created_at)"
        " VALUES ('ann', 'lead', 'x', 3, 0), ('bob', 'annotator', 'x', 0, 0)",
        "INSERT INTO source_people VALUES ('ann', 'law')",
        "INSERT INTO prompts (id, messages, split, source, created_at)"
        f" VALUES ('p', '{messages}', 'train', 'law', 0)",
        "INSERT INTO tasks (prompt_id, responses, open, created_at) VALUES ('p', '[]', 1, 0)",
    ):
        old.execute(statement)
    old.conn.commit()
    old.close()
    with Store(tmp_path / "old.db") as opened:
        assert given(opened) == {"law": Receivers(people=("ann",))}
        [ann, bob] = Users(opened).all()
        assert (ann.role, ann.epoch, ann.team, bob.team) == ("lead", 3, "", "")
        assert all_teams(opened.connections) == {}
        add(opened, "law", 1)
        add(opened, "news", 0)
        Users(opened).set_team("bob", "red")
        give_source(opened.connections, "news", [], ["red"])
        add(opened, "news", 1)
        query = "SELECT reserved FROM tasks ORDER BY id"
        reserved = [row[0] for row in opened.connections.db.execute(query)]
        assert reserved == ["law", "law", "news", "news"]
