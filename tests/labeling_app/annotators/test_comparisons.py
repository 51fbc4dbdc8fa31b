"""Pairs in the queue among other tasks, and who counts as a vote."""

import json

import pytest

from labeling_app.annotators.comparisons import (
    VoteCount,
    count_votes,
    queue_pairs,
    read_votes,
    tasks_of_pairs,
)
from labeling_app.data_io.exporting import export
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.quality.adjudication import open_adjudication
from rlhf.errors import InputError
from rlhf.records.ranked import read_ranked
from rlhf.records.schema import Ranking


def make_pairs(make_prompt, make_responses, number: int):
    prompts = [make_prompt(f"Question {n}?") for n in range(number)]
    return [(p, *make_responses(p, [f"old {p.text}", f"new {p.text}"])) for p in prompts]


def submit(queue, name: str, tiers_of) -> None:
    queue.add_annotator(name)
    task = queue.next_task(name)
    tiers = tiers_of(list(task.texts))
    queue.submit(name, Submission(id=f"{name}{task.id}", task_id=task.id, tiers=tiers))


def test_votes_are_counted_per_person_with_ties_as_half(store, make_prompt, make_responses) -> None:
    pairs = make_pairs(make_prompt, make_responses, 1)
    assert queue_pairs(store, pairs, overlap=3, mix=False, seed=0) == 1
    queue = TaskQueue(store)

    def place(texts: list[str], start: str) -> int:
        return next(n for n, text in enumerate(texts) if text.startswith(start))

    submit(queue, "ann", lambda t: ((place(t, "new"),), (place(t, "old"),)))
    submit(queue, "ben", lambda t: ((place(t, "old"),), (place(t, "new"),)))
    submit(queue, "cleo", lambda t: ((0, 1),))
    votes = read_votes(store, pairs)
    assert [(vote.annotator, vote.second) for vote in votes] == [
        ("ann", 1.0),
        ("ben", 0.0),
        ("cleo", 0.5),
    ]


def test_partial_rankings_signals_and_other_tasks_are_no_votes(
    store, make_prompt, make_responses
) -> None:
    pairs = make_pairs(make_prompt, make_responses, 1)
    queue_pairs(store, pairs, overlap=1, mix=False, seed=0)
    submit(TaskQueue(store), "ann", lambda texts: ((0,),))
    prompt, old, new = pairs[0]
    for name, kind in (("judge", "ai"), ("ben", "human")):
        tiers = ((new.id,), (old.id,))
        ranking = Ranking(id=name, prompt_id=prompt.id, annotator=name, kind=kind, tiers=tiers)
        store.add_rankings([ranking])
    assert read_votes(store, pairs) == []


def test_a_leads_decision_is_no_vote(store, make_prompt, make_responses) -> None:
    pairs = make_pairs(make_prompt, make_responses, 1)
    queue_pairs(store, pairs, overlap=1, mix=False, seed=0)
    queue = TaskQueue(store)
    submit(queue, "ann", lambda texts: ((0, 1),))
    queue.add_annotator("lea")
    [task_id] = store.connections.db.execute("SELECT id FROM tasks").fetchone()
    open_adjudication(queue, "lea", task_id)
    submit(queue, "lea", lambda texts: ((0,), (1,)))
    rows = store.connections.db.execute("SELECT annotator FROM rankings WHERE live = 1").fetchall()
    assert rows == [("ann",), ("lea",)]
    assert [(vote.annotator, vote.second) for vote in read_votes(store, pairs)] == [("ann", 0.5)]


def test_votes_and_decisions_on_them_are_not_exported(
    store, fill, make_prompt, make_responses, tmp_path
) -> None:
    queue_pairs(store, make_pairs(make_prompt, make_responses, 1), overlap=1, mix=False, seed=0)
    queue = TaskQueue(store)
    submit(queue, "ann", lambda texts: ((0,), (1,)))
    queue.add_annotator("lea")
    [task_id] = store.connections.db.execute("SELECT id FROM tasks").fetchone()
    open_adjudication(queue, "lea", task_id)
    submit(queue, "lea", lambda texts: ((1,), (0,)))
    with pytest.raises(InputError, match="holds responses and no rankings"):
        export(store, tmp_path / "votes", "ranked")
    [ranked] = fill(1, 2)
    submit(queue, "ann", lambda texts: ((0,), (1,)))
    assert export(store, tmp_path / "out", "ranked")["rankings"] == 1
    by_prompt = {r.prompt.text: len(r.rankings) for r in read_ranked(tmp_path / "out")}
    assert by_prompt == {"Question 0?": 0, ranked.text: 1}


def test_pairs_come_behind_rankings_or_among_them(store, fill, make_prompt, make_responses) -> None:
    fill(8, 2)
    pairs = make_pairs(make_prompt, make_responses, 8)
    queue_pairs(store, pairs, overlap=1, mix=False, seed=0)

    def purposes() -> list[str]:
        rows = store.connections.db.query("SELECT purpose FROM tasks ORDER BY priority DESC, id")
        return [row["purpose"] for row in rows]

    assert purposes() == ["rank"] * 8 + ["compare"] * 8
    rows = store.connections.db.query("SELECT responses FROM tasks WHERE purpose = 'compare'")
    order = [json.loads(row["responses"])[0] for row in rows]
    assert order != [old.id for _, old, _ in pairs]
    assert sorted(order) == sorted(old.id for _, old, _ in pairs)
    more = make_pairs(lambda text: make_prompt(f"More: {text}"), make_responses, 8)
    assert queue_pairs(store, [*pairs, *more], overlap=1, mix=True, seed=0) == 8
    assert "rank" in purposes()[8:]
    assert "compare" in purposes()[:8]
    rows = store.connections.db.query("SELECT id FROM tasks ORDER BY priority DESC, id")
    kept = [row["id"] for row in rows if row["id"] <= 16]
    assert kept == list(range(1, 17))  # those that waited, in their old order


def test_votes_are_counted_as_they_come_in(store, make_prompt, make_responses) -> None:
    pairs = make_pairs(make_prompt, make_responses, 2)
    queue_pairs(store, pairs, overlap=2, mix=False, seed=0)
    tasks, queue = tasks_of_pairs(store, pairs), TaskQueue(store)
    assert len(set(tasks)) == 2
    assert count_votes(store.connections, tasks) == VoteCount(given=0, wanted=4, people=0)
    submit(queue, "ann", lambda texts: ((0,), (1,)))
    submit(queue, "ann", lambda texts: ((0, 1),))
    submit(queue, "ben", lambda texts: ((1,), (0,)))
    submit(queue, "cleo", lambda texts: ((1,),))  # leaves one response out: no vote
    assert count_votes(store.connections, tasks) == VoteCount(given=3, wanted=4, people=2)
    assert len(read_votes(store, pairs)) == 3
    assert tasks_of_pairs(store, make_pairs(make_prompt, make_responses, 3)) == tasks
