"""The board's protocol: what the browser may send, and that it never learns who wrote what."""

import json

import pytest

from labeling_app.session import Board


@pytest.fixture
def board(store, queue):
    queue.add_annotator("ann")
    return Board(store, queue)


def submit(task: dict, **fields) -> dict:
    return {"op": "submit", "id": "u1", "task_id": task["id"], "tiers": [[0], [1]], **fields}


def test_a_task_carries_no_model_name_and_no_id(board, store, fill):
    fill(1, 3)
    screen = board.answer("ann", {"op": "next"})
    text = json.dumps(screen)
    [record] = store.ranked_prompts()
    assert "secret-model" not in text
    assert not any(response.id in text for response in record.responses)
    assert len(screen["task"]["cards"]) == 3


def test_submitting_brings_the_next_task(board, fill):
    fill(2, 2)
    first = board.answer("ann", {"op": "next"})
    second = board.answer("ann", submit(first["task"]))
    assert (first["done"], second["done"]) == (0, 1)
    assert second["task"]["id"] != first["task"]["id"]
    last = board.answer("ann", submit(second["task"], id="u2"))
    assert last["task"] is None
    assert last["nothing_left"] == "You have done everything there is. Thank you!"


def test_tasks_held_by_others_are_not_called_nothing(board, queue, fill):
    fill(1, 2)
    queue.add_annotator("bob")
    board.answer("bob", {"op": "next"})
    message = board.answer("ann", {"op": "next"})["nothing_left"]
    assert message.startswith("1 task is being labelled by others until ")


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"op": "delete everything"}, "Unknown operation 'delete everything'"),
        ({}, "Unknown operation None"),
        ({"op": "submit"}, "malformed"),
        ({"op": "submit", "id": "u", "task_id": 99, "tiers": [[0]]}, "was never given to ann"),
        ({"op": "submit", "id": "u", "task_id": 1, "tiers": [["x"]]}, "malformed"),
        ({"op": "submit", "id": "u", "task_id": 1, "tiers": [[0], [0]]}, "in two tiers"),
        ({"op": "submit", "id": "u", "task_id": 1, "tiers": [[0], [1]], "strengths": [9]},
         "Unknown strength"),
        ({"op": "submit", "id": "u", "task_id": 1, "tiers": [[0], [1]], "note": "x" * 10_001},
         "at most 10000 characters"),
        ({"op": "skip", "id": "k" * 65, "task_id": 1}, "at most 64 characters"),
        ({"op": "draft", "task_id": 1, "state": {"note": "x" * 300_000}}, "The draft has"),
        ({"op": "undo"}, "There is nothing to undo"),
    ],
)  # fmt: skip
def test_refusals_are_sentences_and_store_nothing(board, store, fill, payload, error):
    fill(1, 2)
    board.answer("ann", {"op": "next"})
    answer = board.answer("ann", payload)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert store.counts()["rankings"] == 0


def test_drafts_and_skips_and_undo_go_through(board, fill):
    fill(2, 2)
    task = board.answer("ann", {"op": "next"})["task"]
    assert board.answer("ann", {"op": "draft", "task_id": task["id"], "state": {"note": "a"}})["ok"]
    assert board.answer("ann", {"op": "next"})["task"]["draft"] == {"note": "a"}
    skip = {"op": "skip", "id": "k", "task_id": task["id"], "reason": "Too long", "note": ""}
    assert board.answer("ann", skip)["task"]["id"] != task["id"]
    assert board.answer("ann", {"op": "undo"})["task"]["id"] == task["id"]


def test_a_full_disk_is_said_and_may_be_retried(board, store, fill):
    fill(1, 2)
    task = board.answer("ann", {"op": "next"})["task"]
    db = store.connections.db
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    answer = board.answer("ann", submit(task, note="x" * 9_000))
    assert answer["retry"] is True
    assert "could not write (database or disk is full)" in answer["error"]
    db.execute("PRAGMA max_page_count = 1000000")
    assert board.answer("ann", submit(task, note="x" * 9_000))["done"] == 1
