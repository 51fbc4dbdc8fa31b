"""How often the reward model agrees with the judgments, and how sure that number is.

Ties are left out, because they prefer no response; equal rewards count as half right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from reward.data.groups import Group
from rlhf.run.intervals import MIN_PROMPTS

RESAMPLES = 2000


class CorrectCounts(NamedTuple):
    """Of pairs and of thumbs, how many the rewards get right and how many there are."""

    right_pairs: float
    pairs: float
    right_thumbs: float
    thumbs: float

    def accuracies(self) -> dict[str, float]:
        """The share of pairs and of thumbs that are right; a batch of ties alone has accuracy 0."""
        accuracies = {}
        if self.pairs or not self.thumbs:
            accuracies["accuracy"] = self.right_pairs / max(self.pairs, 1)
        if self.thumbs:
            accuracies["thumbs_accuracy"] = self.right_thumbs / self.thumbs
        return accuracies


@dataclass(frozen=True)
class Accuracy:
    """Share of pairs ordered as judged, its 95 % interval, and how many pairs and prompts.

    `low` and `high` are None where there are too few prompts for an interval.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    prompts: int


def win_credit(difference: float) -> float:
    """1 where the preferred response got the higher reward, ½ for equal rewards, else 0."""
    return 0.5 if difference == 0 else float(difference > 0)


def count_right(group: Group, rewards: Sequence[float]) -> tuple[float, int]:
    """Of a group's pairs without ties, how many the rewards order as judged, and their number."""
    right = sum(
        win_credit(rewards[pair.first] - rewards[pair.second])
        for pair in group.pairs
        if pair.outcome != 0.5
    )
    return right, group.num_preferences


def count_judgments(
    groups: Sequence[Group], rewards: Sequence[Sequence[float]], thresholds: Iterable[float]
) -> CorrectCounts:
    """Count the pairs that are ordered as judged and the thumbs on the right side of b.

    Args:
        groups: prompts.
        rewards: of their responses.
        thresholds: b of their pointwise judgments, in order.
    """
    both = list(zip(groups, rewards, strict=True))
    judged = [
        (judgment, row[judgment.response]) for group, row in both for judgment in group.pointwise
    ]
    thumbs = [
        win_credit((reward - b) * (1 if judgment.is_good else -1))
        for (judgment, reward), b in zip(judged, thresholds, strict=True)
    ]
    right, pairs = (
        zip(*(count_right(group, row) for group, row in both), strict=True) if both else ((), ())
    )
    return CorrectCounts(sum(right), sum(pairs), sum(thumbs), len(thumbs))


def pair_accuracy(groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> Accuracy | None:
    """Accuracy over all pairs of some groups; None if there are only ties."""
    pairs = zip(groups, rewards, strict=True)
    return accuracy_of_counts(count_right(group, values) for group, values in pairs)


def accuracy_of_counts(counts: Iterable[tuple[float, int]]) -> Accuracy | None:
    """Accuracy from the counts of `count_right` for every prompt; None without any pair.

    The interval comes from resampling whole prompts, because the pairs of one prompt share
    responses and are not independent.
    """
    table = np.array([count for count in counts if count[1]], dtype=np.float64).reshape(-1, 2)
    if not len(table):
        return None
    right, pairs = table.sum(axis=0)
    low, high = _interval(table) if len(table) >= MIN_PROMPTS else (None, None)
    return Accuracy(float(right / pairs), low, high, int(pairs), len(table))


def _interval(table: Float[ndarray, "P 2"]) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(table), size=(RESAMPLES, len(table)))
    sums = table[drawn].sum(axis=1)  # (resamples, 2)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return float(low), float(high)


def plain_accuracy(accuracy: Accuracy | None) -> dict[str, Any] | None:
    """An accuracy as JSON values."""
    return asdict(accuracy) if accuracy else None
