"""Blind comparisons of two responses: pairs into the queue, people's votes out of it.

Such a task looks like any other: two responses without names, in an order of each person's own.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlite_utils import Database

from labeling_app.db.connection import Connections
from labeling_app.db.rankings import comparison_votes, rankings_of_people
from labeling_app.db.store import Store
from labeling_app.db.tasks import (
    comparison_task,
    insert_task,
    num_people_wanted,
    set_order,
    waiting_tasks,
)
from rlhf.records.schema import Prompt, Response

REASON = "evaluation"
Pair = tuple[Prompt, Response, Response]


@dataclass(frozen=True, kw_only=True)
class PairVote:
    """One person's vote on a pair: 1 for the second response, ½ for a tie, 0 for the first."""

    prompt_id: str
    annotator: str
    second: float


@dataclass(frozen=True, kw_only=True)
class VoteCount:
    """How many votes on some pairs are in.

    Args:
        given: how many.
        wanted: how many were asked for: the people per pair, summed over the pairs.
        people: how many people have given them.
    """

    given: int
    wanted: int
    people: int


def queue_pairs(store: Store, pairs: Sequence[Pair], *, overlap: int, mix: bool, seed: int) -> int:
    """Queue every pair that is not queued yet, in random order; returns how many were new.

    Args:
        store: the database; it gets the prompts and responses that it lacks.
        pairs: a prompt and the two responses to compare.
        overlap: how many people vote on each pair.
        mix: put each at a random position among the open tasks, which keep their order, also where
            `rlhf prioritize` reorders rankings later; otherwise all come after them.
        seed: of the order.
    """
    shuffled = random.Random(seed)
    with store.connections.write() as db:
        waiting = waiting_tasks(db)
        store.add_prompts(prompt for prompt, _, _ in pairs)
        store.add_responses((r for _, *both in pairs for r in both), queue=False)
        new = [pair for pair in pairs if not _is_queued(db, pair)]
        shuffled.shuffle(new)
        added = [
            insert_task(
                db, pair[0].id, _ids(pair), purpose="compare", overlap=overlap, reason=REASON
            )
            for pair in new
        ]
        if mix:
            positions: list[tuple[float, int]] = [*enumerate(waiting)]
            positions += [(shuffled.uniform(-1, len(waiting)), id_) for id_ in added]
            set_order(db, [id_ for _, id_ in sorted(positions)])
    return len(new)


def are_queued(store: Store, pairs: Iterable[Pair]) -> bool:
    """Whether people were asked about any of these pairs in this database."""
    return any(_is_queued(store.connections.db, pair) for pair in pairs)


def tasks_of_pairs(store: Store, pairs: Iterable[Pair]) -> list[int]:
    """The tasks of the pairs that are queued in this database."""
    db = store.connections.db
    task_ids = (comparison_task(db, pair[0].id, _ids(pair)) for pair in pairs)
    return [task_id for task_id in task_ids if task_id is not None]


def count_votes(connections: Connections, task_ids: Sequence[int]) -> VoteCount:
    """How many votes are in on the pairs of some tasks; counts what `read_votes` reads."""
    rankings = rankings_of_people(connections, task_ids)
    voters = [name for name, tiers in rankings if sum(map(len, tiers)) == 2]  # both
    wanted = num_people_wanted(connections.db, task_ids)
    return VoteCount(given=len(voters), wanted=wanted, people=len(set(voters)))


def read_votes(store: Store, pairs: Iterable[Pair]) -> list[PairVote]:
    """People's votes on these pairs; rankings that leave one response out are not votes.

    Leads' decisions are left out: a lead sees the votes before deciding.
    """
    votes = []
    for pair in pairs:
        prompt, first, second = pair
        for annotator, tiers in comparison_votes(store.connections, prompt.id, _ids(pair)):
            tier_of = {id_: tier for tier, ids in enumerate(tiers) for id_ in ids}
            if first.id in tier_of and second.id in tier_of:
                above = tier_of[first.id] - tier_of[second.id]
                share = 0.5 if above == 0 else float(above > 0)
                votes.append(PairVote(prompt_id=prompt.id, annotator=annotator, second=share))
    return votes


def _is_queued(db: Database, pair: Pair) -> bool:
    return comparison_task(db, pair[0].id, _ids(pair)) is not None


def _ids(pair: Pair) -> list[str]:
    return [response.id for response in pair[1:]]
