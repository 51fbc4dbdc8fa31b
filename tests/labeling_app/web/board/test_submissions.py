"""What a browser may send: a used id drops and tells nothing, and every field is bounded."""

import json

import pytest

from labeling_app.data_io.exporting import ROWS, export
from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.quality.report import measure_quality
from labeling_app.web.board.session import Board
from rlhf.errors import InputError
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import Ranking
from tests.labeling_app.asking import ask


@pytest.fixture
def board(store, queue):
    for name in ("ann", "bob", "lea"):
        queue.add_annotator(name)
    return Board(store, queue)


def next_task(board: Board, who: str = "ann") -> dict:
    return ask(board, who, {"op": "next"})["task"]


def submission(task: dict, **fields) -> dict:
    return {"op": "submit", "id": "u1", "ticket": task["ticket"], "tiers": [[0], [1]], **fields}


def stored(store: Store) -> list[tuple]:
    return store.connections.db.execute("SELECT id, task_id FROM rankings ORDER BY seq").fetchall()


@pytest.mark.parametrize("op", ["submit", "skip"])
@pytest.mark.parametrize("id", ["", " ", None])
def test_what_has_no_id_is_refused(board, store, fill, op, id):
    fill(2, 2)
    task = next_task(board)
    answer = ask(board, "ann", submission(task, op=op, id=id))
    assert answer["ok"] is False
    assert answer["error"].startswith(("The id is empty", "The id must be text"))
    assert (store.counts()["rankings"], next_task(board)) == (0, task)


def test_a_second_submission_under_a_used_id_is_refused_and_not_dropped(board, store, fill):
    fill(2, 2)
    first = next_task(board)
    second = ask(board, "ann", submission(first))["task"]
    again = ask(board, "ann", submission(second))
    assert again["error"] == (
        "This id was used before, for something else. Reload the page, or send it under another id."
    )
    assert again["retry"] is False
    other = ask(board, "ann", submission(first, tiers=[[1], [0]]))
    assert "used before" in other["error"]
    assert ask(board, "ann", submission(first))["ok"]  # the very same, sent again
    assert stored(store) == [("u1", 1)]
    assert ask(board, "ann", submission(second, id="u2"))["done"] == 2


def test_a_second_skip_under_a_used_id_is_refused_and_not_dropped(board, store, fill):
    fill(3, 2)
    skip = {"op": "skip", "id": "k", "ticket": next_task(board)["ticket"], "reason": "Too long"}
    second = ask(board, "ann", skip)["task"]
    assert ask(board, "ann", skip)["task"] == second
    assert "used before" in ask(board, "ann", {**skip, "ticket": second["ticket"]})["error"]
    assert store.connections.db.execute("SELECT COUNT(*) FROM skips").fetchone() == (1,)


def test_an_id_of_somebody_else_s_ranking_is_neither_refused_nor_revealed(board, store, fill):
    [prompt] = fill(1, 2)
    [first, second] = store.responses(prompt.id)
    judged = Ranking(id="of-judge", prompt_id=prompt.id, annotator="judge:m", kind="ai",
                     tiers=((first.id,), (second.id,)))  # fmt: skip
    store.add_rankings([judged])
    task = next_task(board)
    for _ in range(2):
        assert ask(board, "ann", submission(task, id="of-judge"))["done"] == 1
    assert [task_id for _, task_id in stored(store)] == [None, 1]


def test_a_used_id_reveals_no_training_answer(import_lines, board):
    lines = [
        {"prompt": f"t{n}", "responses": ["good", "bad"], "tiers": [[0], [1]],
         "purpose": "training", "explanation": "Because."}
        for n in range(2)
    ]  # fmt: skip
    import_lines(*lines)
    first = next_task(board)
    screen = ask(board, "ann", submission(first))
    assert screen["feedback"]["explanation"] == "<p>Because.</p>\n"
    for fields in ({}, {"id": ""}, {"tiers": [[0, 1]]}):
        answer = ask(board, "ann", submission(screen["task"], **fields))
        assert answer["ok"] is False
        assert "feedback" not in answer
    again = ask(board, "ann", submission(first))  # a repetition gets the same reply
    assert again["feedback"] == screen["feedback"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"flags": ["edited"]}, "'edited' is not a flag here. Use all-bad, or reload the page."),
        ({"flags": ["adjudicated"]}, "'adjudicated' is not a flag here"),
        ({"flags": ["thumbs-down"]}, "'thumbs-down' is not a flag here"),
        ({"flags": ["x@nope"]}, "'x@nope' is not a flag here"),
        ({"flags": [["all-bad"]]}, "is not a flag here"),
        ({"flags": "all-bad"}, "malformed: its flags cannot be used"),
        ({"response_flags": [[0, "edited"]]}, "Use unsafe, untrue, off-topic, broken, or reload"),
        ({"response_flags": [[0, "unsafe@x"]]}, "is not a flag here"),
        ({"response_flags": [["0", "unsafe"]]}, "malformed: its response_flags"),
        ({"response_flags": [[True, "unsafe"]]}, "malformed: its response_flags"),
        ({"response_flags": [[0]]}, "malformed: its response_flags"),
        ({"response_flags": [[7, "unsafe"]]}, "does not fit its 2 responses"),
        ({"tiers": [[0.0], [1]]}, "malformed: its tiers"),
        ({"tiers": [["0"], [1]]}, "malformed: its tiers"),
        ({"tiers": [[0], [1], []]}, "a tier is empty"),
        ({"tiers": {"0": [1]}}, "malformed: its tiers"),
        ({"strengths": ["1"]}, "malformed: its strengths"),
        ({"strengths": [1, 1]}, "does not fit its 2 responses"),
        ({"duration_ms": "1"}, "malformed: its duration_ms"),
        ({"note": 7}, "The note must be text of at most 10000 characters"),
        ({"rubric": "x" * 17}, "The rubric must be text of at most 16 characters"),
        ({"ticket": [1]}, "malformed: its ticket"),
        ({"ticket": True}, "malformed: its ticket"),
        ({"op": "skip", "reason": "x" * 201}, "The reason must be text of at most 200 characters"),
        ({"op": "draft", "state": [["note", "x"]]}, "malformed: its state"),
    ],
)  # fmt: skip
def test_every_field_is_checked(board, store, fill, fields, error):
    fill(1, 2)
    answer = ask(board, "ann", submission(next_task(board), **fields))
    assert answer["ok"] is False
    assert error in answer["error"]
    assert len(answer["error"]) < 300
    assert store.counts()["rankings"] == 0


def test_what_is_large_does_not_grow_in_the_database(board, store, fill):
    fill(1, 2)
    many = {"flags": ["all-bad"] * 50_000, "response_flags": [[0, "unsafe"]] * 50_000}
    screen = ask(board, "ann", submission(next_task(board), duration_ms=2**70, **many))
    assert screen["done"] == 1
    query = "SELECT duration_ms, LENGTH(flags) FROM rankings"
    flags = '["all-bad","unsafe@0123456789abcdef"]'
    assert store.connections.db.execute(query).fetchone() == (604_800_000, len(flags))
    refused = ask(board, "ann", {"op": "x" * 500_000})
    assert len(refused["error"]) < 300


def forge(store: Store, flags: object) -> None:
    """Give the one ranking there is flags that an older version would have stored."""
    db = store.connections.db
    [[trigger]] = db.execute("SELECT sql FROM sqlite_master WHERE name = 'rankings_do_not_change'")
    db.execute("DROP TRIGGER rankings_do_not_change")
    db.execute("UPDATE rankings SET flags = ?", [json.dumps(flags)])
    db.execute(trigger)


@pytest.mark.parametrize("flags", [[["l"]], [7, None], "odd", {"a": 1}, ["x@nope", "@", "a@b@c"]])
def test_odd_flags_that_are_stored_break_neither_export_nor_undo_nor_decision(
    board, store, fill, tmp_path, flags
):
    fill(1, 2)
    task = next_task(board)
    ask(board, "ann", submission(task))
    forge(store, flags)
    for format in (set(ROWS) | {"ranked"}) - {"demonstrations"}:
        assert export(store, tmp_path / format, format)["rankings"] == 1
    [line] = read_jsonl(tmp_path / "ranked" / "train.jsonl")
    assert all(isinstance(flag, str) for flag in line["rankings"][0]["flags"])
    assert ask(board, "ann", {"op": "undo"})["task"]["draft"]["flags"] == []
    assert len(measure_quality(store).times) == 1
    decision = ask(board, "lea", {"op": "decide", "task_id": 1}, may_lead=True)
    assert len(decision["opinions"]) == 1


def test_a_flag_that_was_forged_on_the_board_makes_no_demonstration(board, store, fill, tmp_path):
    fill(1, 2)
    ask(board, "ann", submission(next_task(board)))
    [record] = store.ranked_prompts()
    of_one = f"thumbs-down@{record.responses[0].id}"
    forge(store, ["edited", "thumbs-down", of_one, "adjudicated", "all-bad"])
    [record] = store.ranked_prompts()
    assert record.rankings[0].flags == ("all-bad",)
    with pytest.raises(InputError, match="Nobody has edited a response"):
        export(store, tmp_path / "out", "demonstrations")


def test_what_waited_through_a_new_start_with_other_flags_is_refused_by_name(store, queue, fill):
    fill(1, 2)
    queue.add_annotator("ann")
    task = next_task(Board(store, queue, flags=("rude",)))
    after = Board(store, TaskQueue(store), flags=("kind",))
    answer = ask(after, "ann", submission(task, response_flags=[[0, "rude"]]))
    assert "'rude' is not a flag here. Use kind, or reload the page." in answer["error"]
