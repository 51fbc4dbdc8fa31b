"""Orders the queue by how much a reward model would learn; every task gets the reason."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeling_app.db.store import Store
from labeling_app.db.tasks import open_tasks, set_priorities
from labeling_app.quality.selection import (
    Method,
    choose_one_by_one,
    information,
    largest_plausible_gap,
    mix,
    pair_entropy,
)
from rlhf.errors import InputError
from rlhf.records.schema import Prompt, RankedPrompt, Response

PromptResponses = tuple[Prompt, tuple[Response, ...]]
# For every prompt: the features (K, d) of its responses and their rewards (K), as array-likes.
Reader = Callable[[Sequence[PromptResponses]], list[tuple[Any, Any]]]
Array = NDArray[np.float64]
BATCH = 256
RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class _Task:
    id: int
    features: Array
    rewards: Array


def prioritize(
    store: Store, read: Reader, by: Method, *, random_share: float, most: int, seed: int
) -> dict[str, Any]:
    """Give open tasks a priority and a reason; other tasks come after them, as they were.

    Args:
        store: the database.
        read: a reward model's last-layer features and rewards.
        by: what makes a task worth ranking.
        random_share: at least this share of the first n tasks is drawn at random, for every n.
        most: how many open tasks to look at, drawn at random if there are more.
        seed: random seed.

    Raises:
        InputError: no task is open.
    """
    rng = np.random.default_rng(seed)
    chosen = _draw_open(store, most, rng)
    tasks, known = _read(store, read, chosen)
    scored = _score(tasks, known.covariance, by)
    order = [task for task, _ in sorted(scored.items(), key=lambda item: -item[1])]
    mixed = mix(order, random_share, rng)
    reasons = [(id_, RANDOM if drawn else f"{by} {scored[id_]:.3g}") for id_, drawn in mixed]
    set_priorities(store.connections, reasons)
    num_random = sum(drawn for _, drawn in mixed)
    return {
        "by": by,
        "tasks": len(mixed),
        "random": num_random,
        "pairs_ranked_before": known.num_pairs,
    }


def _draw_open(
    store: Store, most: int, rng: np.random.Generator
) -> dict[str, list[tuple[int, list[str]]]]:
    """(task, response ids) of open tasks by prompt."""
    rows = open_tasks(store.connections)
    if not rows:
        raise InputError(
            "No task is open, so there is nothing to prioritize",
            "Sample more responses: rlhf generate --db DB --model MODEL -k 4",
        )
    by_prompt = defaultdict(list)
    for index in sorted(rng.permutation(len(rows))[:most]):
        id_, prompt_id, responses = rows[index]
        by_prompt[prompt_id].append((id_, responses))
    return by_prompt


def _read(
    store: Store, read: Reader, chosen: dict[str, list[tuple[int, list[str]]]]
) -> tuple[list[_Task], "_Known"]:
    """The chosen tasks, and what the pairs ranked so far tell about the head."""
    tasks: list[_Task] = []
    known = _Known()
    wanted = (r for r in store.ranked_prompts() if r.rankings or r.prompt.id in chosen)
    for records in _batches(wanted):
        read_now = read([(record.prompt, record.responses) for record in records])
        for record, outputs in zip(records, read_now, strict=True):
            features, rewards = (np.asarray(part, dtype=np.float64) for part in outputs)
            position = {response.id: index for index, response in enumerate(record.responses)}
            for id_, ids in chosen.get(record.prompt.id, []):
                of_task = [position[i] for i in ids]
                tasks.append(_Task(id=id_, features=features[of_task], rewards=rewards[of_task]))
            pairs = _ranked_pairs(record, position)
            rows = [information(rewards[pair], features[pair]) for pair in pairs]
            known.add(rows, features.shape[1])
    return tasks, known


class _Known:
    """The covariance of the head's weights: at the start, then after every ranked pair."""

    def __init__(self) -> None:
        self.precision: Array = np.zeros((0, 0))
        self.num_pairs = 0

    def add(self, rows: list[Array], size: int) -> None:
        if not self.precision.size:
            # The head starts with weights of variance 1 / (d + 1).
            self.precision = np.eye(size) * (size + 1)
        if rows:
            pairs = np.concatenate(rows)
            self.precision += pairs.T @ pairs
            self.num_pairs += len(pairs)

    @property
    def covariance(self) -> Array:
        return np.asarray(np.linalg.inv(self.precision), dtype=np.float64)


def _batches(records: Iterator[RankedPrompt]) -> Iterator[list[RankedPrompt]]:
    batch: list[RankedPrompt] = []
    for record in records:
        batch.append(record)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _ranked_pairs(record: RankedPrompt, position: dict[str, int]) -> list[list[int]]:
    """Every pair that a person or a judge has ranked, ties included; each pair once."""
    pairs: set[tuple[int, int]] = set()
    for ranking in record.rankings:
        indices = sorted(position[i] for tier in ranking.tiers for i in tier)
        pairs.update(combinations(indices, 2))
    return [list(pair) for pair in sorted(pairs)]


def _score(tasks: list[_Task], covariance: Array, by: Method) -> dict[int, float]:
    """Every task's score, higher first."""
    if by == "entropy":
        return {task.id: pair_entropy(task.rewards) for task in tasks}
    if by == "fisher":
        rows = [information(task.rewards, task.features) for task in tasks]
        # Gains can only shrink from one pick to the next.
        return {tasks[index].id: gain for index, gain in choose_one_by_one(rows, covariance)}
    return {t.id: largest_plausible_gap(t.rewards, t.features, covariance) for t in tasks}
