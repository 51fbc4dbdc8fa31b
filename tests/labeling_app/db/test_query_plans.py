"""What a submit asks of SQLite is answered by indexes: the cost does not grow with the file."""

import pytest

from labeling_app.db.board.checks import CheckRates, choose_check
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.rankings import num_done, num_rankings_since
from labeling_app.db.reports import votes_on_turns
from labeling_app.web.board.session import Board
from tests.labeling_app.asking import ask

LOOK_UPS = ("SELECT", "UPDATE", "DELETE")


@pytest.fixture
def statements(store, queue, fill) -> list[str]:
    """Every statement of a submit, which brings the next task, and of a draft."""
    fill(20, 3)
    queue.add_annotator("ann")
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    seen: list[str] = []
    store.connections.db.conn.set_trace_callback(seen.append)
    state = {"tiers": [[0], [1], [2]]}
    ask(board, "ann", {"op": "draft", "ticket": task["ticket"], "state": state})
    ask(board, "ann", {"op": "submit", "id": "u", "ticket": task["ticket"], **state})
    store.connections.db.conn.set_trace_callback(None)
    return [one for one in seen if one.lstrip().startswith(LOOK_UPS)]


def plan_of(store, statement: str) -> list[str]:
    return [row[3] for row in store.connections.db.execute(f"EXPLAIN QUERY PLAN {statement}")]


def test_nothing_is_scanned_or_sorted(store, statements):
    assert len(statements) > 10
    # `totals` has five rows whatever the file holds. What triggers do is not in a plan: below.
    harmless = {"SCAN totals"}
    steps = {(step, one) for one in statements for step in plan_of(store, one)} - {
        (step, one) for one in statements for step in harmless
    }
    assert {pair for pair in steps if pair[0].startswith(("SCAN", "USE TEMP B-TREE"))} == set()


def test_the_next_task_is_the_first_step_in_its_index(store, statements):
    [look_up] = [one for one in statements if "ORDER BY priority DESC" in one]
    assert plan_of(store, look_up)[0] == "SEARCH t USING INDEX tasks_open (priority=? AND id>?)"


def steps_of_submits(store, board: Board, people: list[str], times: int) -> int:
    """The steps of SQLite's virtual machine in as many submits, and next tasks, of each."""
    num_steps = 0

    def step() -> int:
        nonlocal num_steps
        num_steps += 1
        return 0

    store.connections.db.conn.set_progress_handler(step, 1)
    for _ in range(times):
        for name in people:
            task = ask(board, name, {"op": "next"})["task"]
            sent = {"op": "submit", "id": f"{name} {task['ticket']}", "ticket": task["ticket"]}
            assert ask(board, name, {**sent, "tiers": [[0], [1]]})["ok"]
    store.connections.db.conn.set_progress_handler(None, 1)
    return num_steps


def test_a_submit_takes_as_many_steps_after_400_tasks_as_after_20(store, queue, fill):
    """Ann is ahead of bob, so that what she has done stays open for him."""
    set_overlap(store.connections, 2)
    fill(20, 2)
    for name in ("ann", "bob"):
        queue.add_annotator(name)
    board = Board(store, queue)
    steps_of_submits(store, board, ["ann"], 10)
    few = steps_of_submits(store, board, ["ann", "bob"], 5)
    fill(500, 2)
    steps_of_submits(store, board, ["ann"], 380)
    assert steps_of_submits(store, board, ["ann", "bob"], 5) <= 1.05 * few
    assert num_done(store.connections, "ann") == 10 + 5 + 380 + 5


def steps_of_more_overlap(store, people: int) -> int:
    """The steps in which all tasks are opened again, where so many people have passed them."""
    num_steps = 0

    def step() -> int:
        nonlocal num_steps
        num_steps += 1
        return 0

    db = store.connections.db
    db.execute("DELETE FROM passed")
    for number in range(people):
        db.execute("INSERT OR IGNORE INTO annotators VALUES (?, 'human', 0)", [str(number)])
        db.execute("INSERT INTO passed VALUES (?, 'null', 0, 10000)", [str(number)])
    db.conn.commit()
    db.conn.set_progress_handler(step, 1)
    set_overlap(store.connections, people)
    db.conn.set_progress_handler(None, 1)
    assert db.execute("SELECT DISTINCT priority, id FROM passed").fetchall() == [(0.0, 1)]
    return num_steps


def test_opening_tasks_does_not_compare_each_with_every_person(store, fill):
    fill(400, 2)
    few = steps_of_more_overlap(store, 2)
    assert steps_of_more_overlap(store, 202) < few + 200 * 100


def test_a_hidden_repeat_reads_ones_own_rankings_only(store, queue):
    queue.add_annotator("ann")
    seen: list[str] = []
    store.connections.db.conn.set_trace_callback(seen.append)
    with store.connections.write() as db:
        choose_check(db, "ann", CheckRates(gold_every=1, repeat_every=1))
    store.connections.db.conn.set_trace_callback(None)
    steps = [
        step for one in seen if one.lstrip().startswith(LOOK_UPS) for step in plan_of(store, one)
    ]
    assert steps
    assert not [step for step in steps if step.startswith("SCAN")]


def test_new_rankings_are_counted_without_reading_the_others(store):
    seen: list[str] = []
    store.connections.db.conn.set_trace_callback(seen.append)
    who = {"kinds": ["human", "ai"], "annotators": ["ann"]}
    num_rankings_since(store.connections, 7, after_import=3, **who)
    store.connections.db.conn.set_trace_callback(None)
    # the questions of live mode among those rankings, and the answers to one of them
    harmless = {"USE TEMP B-TREE FOR count(DISTINCT)", "SCAN s VIRTUAL TABLE INDEX 1:"}
    plans = (plan_of(store, count) for count in seen)
    later, shown_since = ([step for step in plan if step not in harmless] for plan in plans)
    assert later[0] == "SEARCH r USING INTEGER PRIMARY KEY (rowid>?)"
    assert shown_since[0].startswith("SEARCH r USING INDEX rankings_of_import (import_id>?")
    assert not [step for step in later + shown_since if step.startswith("SCAN")]


def test_votes_of_live_mode_are_found_by_their_question(store):
    seen: list[str] = []
    store.connections.db.conn.set_trace_callback(seen.append)
    votes_on_turns(store.connections, 100)
    store.connections.db.conn.set_trace_callback(None)
    steps = [step for one in seen for step in plan_of(store, one)]
    wanted = "SEARCH r USING INDEX rankings_of_prompt (prompt_id=? AND annotator=?)"
    assert wanted in steps
