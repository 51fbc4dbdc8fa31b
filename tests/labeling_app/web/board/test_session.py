"""The board's protocol: what the browser may send, and that it never learns who wrote what."""

import json
import time

import pytest

from labeling_app.db.board.overlap import num_open
from labeling_app.db.queue import TaskQueue
from labeling_app.db.reports import num_made_since
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board, BoardRequest
from rlhf.records.schema import Ranking, Response, Sampling
from tests.labeling_app.asking import ask


@pytest.fixture
def board(store, queue):
    queue.add_annotator("ann")
    return Board(store, queue)


def submit(task: dict, **fields) -> dict:
    return {"op": "submit", "id": "u1", "ticket": task["ticket"], "tiers": [[0], [1]], **fields}


def test_a_task_carries_no_model_name_and_no_id(board, store, fill):
    fill(1, 3)
    screen = ask(board, "ann", {"op": "next"})
    text = json.dumps(screen)
    [record] = store.ranked_prompts()
    assert "secret-model" not in text
    assert not any(response.id in text for response in record.responses)
    assert len(screen["task"]["cards"]) == 3


def test_submitting_brings_the_next_task(board, fill):
    fill(2, 2)
    first = ask(board, "ann", {"op": "next"})
    second = ask(board, "ann", submit(first["task"]))
    assert (first["done"], second["done"]) == (0, 1)
    assert second["task"]["ticket"] != first["task"]["ticket"]
    last = ask(board, "ann", submit(second["task"], id="u2"))
    assert last["task"] is None
    assert last["nothing_left"] == "You have ranked everything. Thank you!"
    assert last["lead_link"] == ("See how people agree", "/lead/quality")


def test_without_tasks_the_board_says_who_adds_them(board):
    screen = ask(board, "ann", {"op": "next"})
    assert screen["nothing_left"] == (
        "There is nothing to rank yet: no prompt has two responses. Tasks appear here by "
        "themselves as soon as there are some."
    )
    assert screen["lead_link"] == ("See what has to be done first", "/lead/data")


def test_tasks_reserved_by_others_are_not_reported_as_nothing_left(board, queue, fill):
    fill(1, 2)
    queue.add_annotator("bob")
    ask(board, "bob", {"op": "next"})
    message = ask(board, "ann", {"op": "next"})["nothing_left"]
    assert message.startswith("1 task is reserved for other people until ")


def test_a_task_that_somebody_else_got_meanwhile_is_not_reported_as_nothing_left(
    board, store, queue, fill
):
    fill(1, 2)
    queue.add_annotator("bob")
    short_leases = TaskQueue(store, lease_seconds=-1)
    assert short_leases.next_task("ann").id == queue.next_task("bob").id
    message = ask(board, "ann", {"op": "next"})["nothing_left"]
    assert message.startswith("1 task is reserved for other people until ")


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"op": "delete everything"}, "Unknown operation 'delete everything'"),
        ({}, "Unknown operation None"),
        ({"op": "submit"}, "The id is empty"),
        ({"op": "submit", "id": "u"}, "malformed"),
        ({"op": "submit", "id": "u", "ticket": 99, "tiers": [[0]]}, "was never given to ann"),
        ({"op": "submit", "id": "u", "ticket": None, "tiers": [[0]]}, "malformed"),
        ({"op": "submit", "id": "u", "tiers": [["x"]]}, "malformed: its tiers cannot be used"),
        ({"op": "submit", "id": "u", "tiers": [[0], [0]]}, "in two tiers"),
        ({"op": "submit", "id": "u", "tiers": [[0], [1]], "strengths": [9]}, "Unknown strength 9."),
        ({"op": "submit", "id": "u", "tiers": [[0], [1]], "note": "x" * 10_001},
         "at most 10000 characters"),
        ({"op": "skip", "id": "k" * 65}, "at most 64 characters"),
        ({"op": "draft", "state": {"note": "x" * 300_000}}, "The draft has"),
        ({"op": "undo"}, "There is nothing to undo"),
    ],
)  # fmt: skip
def test_refusals_are_sentences_and_store_nothing(board, store, fill, payload, error):
    fill(1, 2)
    task = ask(board, "ann", {"op": "next"})["task"]
    answer = ask(board, "ann", {"ticket": task["ticket"], **payload})
    assert answer["ok"] is False
    assert error in answer["error"]
    assert store.counts()["rankings"] == 0


def test_drafts_and_skips_and_undo_go_through(board, fill):
    fill(2, 2)
    task = ask(board, "ann", {"op": "next"})["task"]
    draft = {"op": "draft", "ticket": task["ticket"], "state": {"note": "a"}}
    assert ask(board, "ann", draft)["ok"]
    assert ask(board, "ann", {"op": "next"})["task"]["draft"] == {"note": "a"}
    skip = {"op": "skip", "id": "k", "ticket": task["ticket"], "reason": "Too long", "note": ""}
    assert ask(board, "ann", skip)["task"]["ticket"] != task["ticket"]
    assert ask(board, "ann", {"op": "undo"})["task"]["ticket"] == task["ticket"]


def test_an_undone_answer_counts_until_another_is_submitted_and_the_board_is_told(
    board, store, fill
):
    fill(2, 2)
    task = ask(board, "ann", {"op": "next"})["task"]
    assert ask(board, "ann", submit(task))["task"]["counts"] is False
    again = ask(board, "ann", {"op": "undo"})["task"]
    assert (again["ticket"], again["counts"]) == (task["ticket"], True)
    assert ask(board, "ann", {"op": "next"})["task"]["counts"] is True  # after a reload
    assert store.counts()["rankings"] == 1
    assert ask(board, "ann", submit(again, id="u2"))["task"]["counts"] is False


def test_a_full_disk_is_said_and_may_be_retried(board, store, fill):
    fill(1, 2)
    task = ask(board, "ann", {"op": "next"})["task"]
    db = store.connections.db
    db.execute("VACUUM")  # pages that the schema's steps have freed
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    answer = ask(board, "ann", submit(task, note="x" * 9_000))
    assert answer["retry"] is True
    assert "could not write (database or disk is full)" in answer["error"]
    db.execute("PRAGMA max_page_count = 1000000")
    assert ask(board, "ann", submit(task, note="x" * 9_000))["done"] == 1


@pytest.fixture
def two(board, queue, fill):
    """Ann and Bob with a task each, and what each submits."""
    fill(4, 2)
    queue.add_annotator("bob")
    tasks = {name: ask(board, name, {"op": "next"})["task"] for name in ("ann", "bob")}
    return {name: submit(task, id=f"u-{name}") for name, task in tasks.items()}


def test_those_who_come_together_are_stored_in_one_transaction(board, store, two):
    seen: list[str] = []
    store.connections.db.conn.set_trace_callback(seen.append)
    answers = board.answer_all([BoardRequest(name, payload) for name, payload in two.items()])
    store.connections.db.conn.set_trace_callback(None)
    assert [(answer["annotator"], answer["done"]) for answer in answers] == [("ann", 1), ("bob", 1)]
    assert [one for one in seen if one.startswith(("BEGIN", "COMMIT"))] == [
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]


def test_a_refusal_takes_nothing_of_the_others_back(board, store, two):
    broken = BoardRequest("bob", {**two["bob"], "tiers": [[0], [9]]})
    huge = BoardRequest("bob", {**two["bob"], "ticket": 10**30})
    refused, done, unknown = board.answer_all([broken, BoardRequest("ann", two["ann"]), huge])
    assert "does not fit its 2 responses" in refused["error"]
    assert "Task 10000000000000000000 was never given to bob" in unknown["error"]
    assert done["done"] == 1
    assert store.counts()["rankings"] == 1


def test_a_refusal_takes_back_what_it_had_begun(board, store, two):
    db = store.connections.db
    skip = {"op": "skip", "id": "k", "ticket": two["bob"]["ticket"]}
    # The skip is noted before the draft is looked at.
    again = ask(board, "bob", {**skip, "state": {"note": "x" * 300_000}})
    assert "The draft has" in again["error"]
    assert db.execute("SELECT COUNT(*) FROM skips").fetchone() == (0,)
    state = "SELECT state FROM assignments WHERE annotator = 'bob'"
    assert db.execute(state).fetchall() == [("leased",)]
    assert ask(board, "bob", skip)["ok"]
    assert db.execute(state).fetchall() == [("skipped",), ("leased",)]


def test_who_fits_on_a_full_disk_is_stored_and_who_does_not_may_retry(board, store, two):
    db = store.connections.db
    db.execute("VACUUM")  # pages that the schema's steps have freed
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    long = BoardRequest("ann", {**two["ann"], "note": "x" * 9_000})
    full, fits = board.answer_all([long, BoardRequest("bob", two["bob"])])
    assert (full["ok"], full["retry"]) == (False, True)
    assert "could not write (database or disk is full)" in full["error"]
    assert (fits["ok"], fits["done"]) == (True, 1)
    assert store.counts()["rankings"] == 1


def test_all_wait_once_for_another_program_that_holds_the_file(board, store, two):
    store.connections.db.execute("PRAGMA busy_timeout = 50")
    seen: list[str] = []
    with Store(store.connections.path) as other, other.connections.write():
        store.connections.db.conn.set_trace_callback(seen.append)
        answers = board.answer_all([BoardRequest(name, payload) for name, payload in two.items()])
        store.connections.db.conn.set_trace_callback(None)
    assert seen == ["BEGIN IMMEDIATE"]
    assert [answer["retry"] for answer in answers] == [True, True]
    assert "could not write (database is locked)" in answers[0]["error"]
    assert ask(board, "ann", two["ann"])["ok"]


def test_a_card_says_where_its_response_was_cut_off(board, store, make_prompt):
    prompt = make_prompt("Hi?")
    store.add_prompts([prompt])
    endings = {
        "whole": (True, Sampling(max_new_tokens=16)),
        "cut": (False, Sampling(max_new_tokens=16)),
        "cut elsewhere": (False, None),
        "imported": (None, None),
    }
    store.add_responses(
        Response(id=text, prompt_id=prompt.id, text=text, model="m", finished=finished,
                 sampling=sampling)
        for text, (finished, sampling) in endings.items()
    )  # fmt: skip
    cards = ask(board, "ann", {"op": "next"})["task"]["cards"]
    assert {card["html"].strip(): card["ending"] for card in cards} == {
        "<p>whole</p>": "",
        "<p>cut</p>": "Cut off at 16 tokens",
        "<p>cut elsewhere</p>": "Cut off at the length limit",
        "<p>imported</p>": "",
    }


def test_a_task_is_open_until_it_is_done(board, queue, store, fill):
    fill(3, 2)
    queue.add_annotator("bob")
    screen = ask(board, "ann", {"op": "next"})
    assert num_open(store.connections) == 3
    ask(board, "bob", {"op": "next"})
    assert num_open(store.connections) == 3
    ask(board, "ann", submit(screen["task"]))
    assert num_open(store.connections) == 2


def test_only_what_people_did_in_the_app_counts_for_its_summary(board, store, fill):
    began = time.time()
    fill(2, 2)
    for record in store.ranked_prompts():
        ids = [response.id for response in record.responses]
        store.add_rankings(
            [Ranking(id=f"{record.prompt.id}-s", prompt_id=record.prompt.id, annotator="signal:f",
                     kind="signal", tiers=((ids[0],), (ids[1],)))]
        )  # fmt: skip
    assert num_made_since(store.connections, began) == 0
    task = ask(board, "ann", {"op": "next"})["task"]
    ask(board, "ann", submit(task))
    ask(board, "ann", {"op": "open", "ticket": task["ticket"]})
    ask(board, "ann", submit(task, id="u2", tiers=[[1], [0]]))  # a changed mind counts once
    assert num_made_since(store.connections, began) == 1
    assert num_made_since(store.connections, time.time()) == 0
