"""What leaves the server: nothing by which a check is known from work, and no id of a response."""

import json
import re

import pytest
from sqlite_utils import Database

from labeling_app.db.board.checks import CheckRates
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.files.migrations import migrations
from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board
from tests.labeling_app.asking import ask
from tests.labeling_app.conftest import quality_page

TICKET = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
def mixed(store, import_lines) -> Store:
    """Two training items, three gold ones and 30 plain tasks."""
    lines = [
        {"prompt": f"{purpose} {n}", "responses": ["good", "bad"], "tiers": [[0], [1]],
         "purpose": purpose}
        for purpose, count in {"training": 2, "gold": 3}.items() for n in range(count)
    ]  # fmt: skip
    lines += [{"prompt": f"plain {n}", "responses": ["good", "bad"]} for n in range(30)]
    import_lines(*lines)
    return store


def submission(task: dict, number: int) -> dict:
    return {"op": "submit", "id": f"u{number}", "ticket": task["ticket"], "tiers": [[0], [1]]}


def test_no_number_and_no_id_on_a_screen_distinguishes_checks_from_other_tasks(mixed):
    queue = TaskQueue(mixed, checks=CheckRates(gold_every=2, repeat_every=2))
    queue.add_annotator("ann")
    board = Board(mixed, queue)
    screen = ask(board, "ann", {"op": "next"})
    moves: dict[str, set[tuple]] = {}
    seen = []
    number = 0
    while screen["task"]:
        purpose = queue.next_task("ann").purpose
        seen.append(screen["task"]["ticket"])
        before = {name: value for name, value in screen.items() if isinstance(value, int)}
        shape = {name: sorted(value) for name, value in screen.items() if isinstance(value, dict)}
        screen = ask(board, "ann", submission(screen["task"], number))
        number += 1
        moved = {name: screen[name] - value for name, value in before.items()}
        moves.setdefault(purpose, set()).add(json.dumps([moved, shape["task"]]))
    assert set(moves) == {"training", "gold", "repeat", "rank"}
    assert len(set.union(*moves.values())) == 1  # they all move alike
    assert json.loads(moves["gold"].pop())[0] == {"ok": 0, "has_sign_in": 0, "done": 1}
    assert all(TICKET.fullmatch(ticket) for ticket in seen)
    assert len(set(seen)) == len(seen)


def test_a_ticket_stays_over_reloads_and_restarts_and_is_one_person_s_own(store, queue, fill):
    fill(1, 2)
    set_overlap(store.connections, 2)
    for name in ("ann", "bob"):
        queue.add_annotator(name)
    mine = ask(Board(store, queue), "ann", {"op": "next"})["task"]
    assert ask(Board(store, queue), "ann", {"op": "next"})["task"] == mine
    with Store(store.connections.path) as other:
        again = Board(other, TaskQueue(other))
        assert ask(again, "ann", {"op": "next"})["task"] == mine
        theirs = ask(again, "bob", {"op": "next"})["task"]
    assert theirs["ticket"] != mine["ticket"]
    board = Board(store, queue)
    for foreign in (theirs["ticket"], 1, "1"):
        answer = ask(board, "ann", {**submission(mine, 0), "ticket": foreign})
        assert answer["error"].startswith(f"Task {foreign!s:.20} was never given to ann.")
    ask(board, "ann", submission(mine, 0))
    [past] = ask(board, "ann", {"op": "history"})["past"]
    assert past["ticket"] == mine["ticket"]


def make_old(path, fill_from: Store) -> None:
    """A database as it was before there were tickets, in which Ann holds a task with a draft."""
    db = Database(path)
    migrations.apply(db, stop_before="013_tickets")
    db.attach("full", fill_from.connections.path)
    for table in ("prompts", "responses", "annotators", "tasks"):
        columns = ", ".join(db[table].columns_dict)
        db.execute(f"INSERT INTO {table} SELECT {columns} FROM full.{table}")
    shown = db.execute("SELECT responses FROM tasks WHERE id = 1").fetchone()[0]
    values = [1, "ann", "leased", shown, 9e12, 0]
    db.execute("INSERT INTO assignments VALUES (?, ?, ?, ?, ?, ?)", values)
    db.execute("UPDATE tasks SET open = 0 WHERE id = 1")
    db.execute("""INSERT INTO drafts VALUES (1, 'ann', '{"note": "half done"}', 0)""")
    db.conn.commit()
    db.close()


def test_a_page_that_is_open_during_the_upgrade_goes_on(store, queue, fill, tmp_path):
    fill(2, 2)
    queue.add_annotator("ann")
    make_old(tmp_path / "old.db", store)
    with Store(tmp_path / "old.db") as upgraded:
        board = Board(upgraded, TaskQueue(upgraded))
        draft = {"op": "draft", "task_id": 1, "state": {"note": "more"}}  # as the page knows it
        assert ask(board, "ann", draft) == {"ok": True}
        task = ask(board, "ann", {"op": "next"})["task"]
        # Under the same name the browser finds the draft that it keeps itself.
        assert (task["ticket"], task["draft"]) == ("1", {"note": "more"})
        after = ask(board, "ann", as_before(submission(task, 0)) | {"task_id": 1})
        assert after["done"] == 1
        assert TICKET.fullmatch(after["task"]["ticket"])
        assert "never given" in ask(board, "ann", {**draft, "task_id": 2})["error"]


def as_before(payload):
    """A request as pages sent it that were loaded before it had a `ticket`."""
    rest = dict(payload)
    return {"task_id": rest.pop("ticket"), **rest}


def test_a_page_loaded_before_an_upgrade_knows_a_ticket_under_its_old_names(store, queue, fill):
    fill(2, 2)
    queue.add_annotator("ann")
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    assert task["id"] == task["ticket"]
    draft = {"op": "draft", "ticket": task["id"], "state": {"note": "half done"}}
    assert ask(board, "ann", as_before(draft)) == {"ok": True}
    assert ask(board, "ann", as_before(submission(task, 0)))["done"] == 1
    [past] = ask(board, "ann", {"op": "history"})["past"]
    opened = ask(board, "ann", {"op": "open", "task_id": past["task_id"]})["task"]
    assert (opened["ticket"], opened["draft"]["tiers"]) == (task["ticket"], [[0], [1]])


HOSTILE = [
    {"tiers": [[0], [0]]},
    {"tiers": [[0], []]},
    {"tiers": [[0, 0]]},
    {"tiers": [[0], [1], [9]]},
    {"tiers": [[-1], [0]]},
    {"tiers": [[0], [1]], "strengths": [1, 2]},
    {"tiers": [[0], [1]], "response_flags": [[5, "unsafe"]]},
    {"tiers": None},
    {"id": ""},
    {"op": "decide", "task_id": 1},
    {"op": "open"},
    {"op": "open", "ticket": "no"},
    {"op": "skip", "id": ""},
    {"op": "draft", "state": None},
    {"op": "history"},
    {"op": "undo"},
]


@pytest.mark.parametrize("may_lead", [False, True])
def test_no_answer_holds_an_id_of_a_response_or_the_name_of_a_model(store, queue, fill, may_lead):
    fill(2, 2)
    queue.add_annotator("ann")
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    said = [ask(board, "ann", {**submission(task, 0), **one}, may_lead=may_lead)
            for one in HOSTILE]  # fmt: skip
    said.append(ask(board, "ann", submission(task, 0)))
    said += [ask(board, "ann", {**submission(task, 0), **one}, may_lead=may_lead)
             for one in HOSTILE]  # fmt: skip
    text = json.dumps(said) + quality_page(store)
    ids = [row[0] for row in store.connections.db.execute("SELECT id FROM responses")]
    assert len(ids) == 4
    assert [one for one in [*ids, "secret-model"] if one in text] == []
