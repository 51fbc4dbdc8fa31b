"""Thresholds of thumbs: b, the reward above which a source says "good", fitted for every source.

A source is an annotator: a person, or a program that passes on the thumbs of its users. Those with
fewer than MIN_OF_EACH ups or downs share one b; if all their thumbs are the same, b is the level.

b = level + offset. The level is the mean reward of the responses at hand; the offset is a number
for each source, kept outside the network and the same in every process.

* Before the first step and after the last one the offsets are fitted exactly, on up to MEMORY
  thumbs of each source (`solve`). The last fit is for the saved weights, and its b is in
  report.json.
* A batch with thumbs is scored before its step, at the cost of one more forward pass. Its mean
  reward is the level: thumbs, unlike pairs, depend on a shift of all rewards, and a step may shift
  rewards more than it separates them, faster than a b learned over many steps could follow.
* Then offset ← offset − 4·ḡ·f, with ḡ the mean gradient by b of the batch's n thumbs of a source
  and f their part n / min(N, MEMORY) of the latest ones, at most 1; N counts all so far. The
  curvature of −log σ is at most ¼, so 4·ḡ cannot overshoot (Böhning and Lindsay, 1988), and f makes
  the offset an average over the last MEMORY thumbs. Offsets and N are in the checkpoints, in
  progress.json.

b is not a parameter of the optimizer: at the learning rates of the weights, about 1e-5, it would
hardly move, and every sharding and adapter would have to support it. Minimizing over b within each
batch would be wrong: a batch of one thumb, or of ups alone, would have no gradient.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from reward.data.groups import Group, Pointwise
from reward.data.stored_groups import StoredGroups
from rlhf.errors import InputError

MIN_OF_EACH = 8
MEMORY = 256
STEP = 4.0  # 1 / the largest curvature of −log σ
REACH = 50.0  # b is less than log(number of thumbs) beyond their rewards
OTHERS = ""  # no annotator has this name
Score = Callable[[Sequence[Group]], Sequence[Sequence[float]]]


@final
class Thresholds:
    """b of every source; without pointwise judgments there is no source.

    Args:
        train: groups to train on, whose judgments decide who is a source alone.
        others: groups that are only measured.
    """

    def __init__(self, train: StoredGroups | None = None, others: Sequence[Group] = ()) -> None:
        learned = train.with_pointwise() if train else ()
        counts = Counter(
            (judgment.annotator, judgment.is_good)
            for group in learned
            for judgment in group.pointwise
        )
        names = {name for name, _ in counts}
        names |= {judgment.annotator for group in others for judgment in group.pointwise}
        own = {n for n in names if min(counts[n, True], counts[n, False]) >= MIN_OF_EACH}
        self.sources = [*sorted(own), *([OTHERS] if names - own else [])]
        self._offsets = dict.fromkeys(self.sources, 0.0)
        self._seen = dict.fromkeys(self.sources, 0)
        self._indices = {name: index for index, name in enumerate(self.sources)}
        verdicts = {good for name, good in counts if name not in own}
        self._fitted = sorted(own | ({OTHERS} if len(verdicts) == 2 else set()))

    def source(self, annotator: str) -> str:
        """The source of an annotator's thumbs: the annotator, or OTHERS."""
        return annotator if annotator in self._indices else OTHERS

    def is_fitted(self, source: str) -> bool:
        """False where b is the mean reward."""
        return source in self._fitted

    def numbers(self, groups: Sequence[Group]) -> Int[Tensor, " T"]:
        """The number of the source of every pointwise judgment of some groups, in order."""
        names = [
            self.source(judgment.annotator) for group in groups for judgment in group.pointwise
        ]
        return torch.tensor([self._indices[name] for name in names], dtype=torch.long)

    def values(self, level: float) -> dict[str, float]:
        """The b of every source, given the mean reward."""
        return {source: level + offset for source, offset in self._offsets.items()}

    def of(self, groups: Sequence[Group], level: float) -> Float[Tensor, " T"]:
        """The b of every pointwise judgment of some groups, in order, given the mean reward."""
        values = torch.tensor(list(self.values(level).values()), dtype=torch.float32)
        return values[self.numbers(groups)]

    def update(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> float:
        """Move the offsets with the rewards of the next batch, and return its level."""
        level = mean_reward(rewards)
        for source in self._fitted:
            values, good, weights = self._judged(source, groups, rewards)
            if count := len(values):
                self._seen[source] += count
                share = count / max(count, min(self._seen[source], MEMORY))
                slopes = gradient(values, good, level + self._offsets[source])
                mean = float((weights * slopes).sum() / weights.sum())
                self._offsets[source] -= STEP * mean * share
        return level

    def fit(self, groups: StoredGroups, score: Score) -> float:
        """Set every offset to its best value for the rewards as they are, and return their level.

        Args:
            groups: of the training; up to MEMORY of them, and up to MEMORY with thumbs of each
                source, are scored.
            score: returns the rewards of the responses of some groups.
        """
        typical = set(groups.indices_of_part(MEMORY).tolist())
        chosen = set(typical)
        judged = self._indices_by_source(groups)
        for source in self._fitted:
            indices = np.array(judged[source], dtype=np.int64)
            part = groups.select(indices).indices_of_part(MEMORY)
            chosen.update(indices[part].tolist())
        ordered = sorted(chosen)
        sample = list(groups.select(np.array(ordered)))
        rewards = score(sample)
        both = zip(ordered, rewards, strict=True)
        level = mean_reward([row for index, row in both if index in typical])
        for source in self._fitted:
            values, good, weights = self._judged(source, sample, rewards)
            self._offsets[source] = solve(values, good, weights) - level
            self._seen[source] = len(values)
        return level

    def _indices_by_source(self, groups: StoredGroups) -> dict[str, list[int]]:
        """The indices of the groups with judgments by each source."""
        by_source: dict[str, list[int]] = defaultdict(list)
        indices = np.flatnonzero(groups.numbers("pointwise"))
        for index, group in zip(indices.tolist(), groups.select(indices), strict=True):
            for source in {self.source(judgment.annotator) for judgment in group.pointwise}:
                by_source[source].append(index)
        return by_source

    def state(self) -> dict[str, list[float]]:
        """Each offset and how many judgments it has seen, for a checkpoint."""
        return {source: [self._offsets[source], self._seen[source]] for source in self.sources}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state from a checkpoint.

        Raises:
            InputError: it lacks a source.
        """
        missing = [source or "others" for source in self.sources if source not in state]
        if missing:
            raise InputError(
                f"The checkpoint has no threshold for the thumbs of {', '.join(missing)}",
                "It comes from a run without them: start again in another --out.",
            )
        for source in self.sources:
            offset, seen = state[source]
            self._offsets[source], self._seen[source] = offset, round(seen)

    def _judged(
        self, source: str, groups: Sequence[Group], rewards: Sequence[Sequence[float]]
    ) -> tuple[ndarray, ndarray, ndarray]:
        """Reward, verdict and weight of every judgment by a source."""
        judgments: list[tuple[float, Pointwise]] = [
            (values[judgment.response], judgment)
            for group, values in zip(groups, rewards, strict=True)
            for judgment in group.pointwise
            if self.source(judgment.annotator) == source
        ]
        return (
            np.array([value for value, _ in judgments], dtype=np.float64),
            np.array([judgment.is_good for _, judgment in judgments], dtype=np.float64),
            np.array([judgment.weight for _, judgment in judgments], dtype=np.float64),
        )


def mean_reward(rewards: Sequence[Sequence[float]]) -> float:
    """The mean over all responses of all groups."""
    return float(np.mean([value for row in rewards for value in row]))


def gradient(
    rewards: Float[ndarray, " T"], good: Float[ndarray, " T"], b: float
) -> Float[ndarray, " T"]:
    """Derivative by b of −log σ(r − b) where good is 1, of −log σ(b − r) where it is 0."""
    from scipy.special import expit  # a rented GPU has no scipy, and its rankings have no thumbs

    derivative: Float[ndarray, " T"] = good - expit(rewards - b)
    return derivative


def solve(
    rewards: Float[ndarray, " T"], good: Float[ndarray, " T"], weights: Float[ndarray, " T"]
) -> float:
    """argmin_b Σ_i w_i·(−log σ(±(r_i − b))), + for good responses and − for bad ones.

    Half a thumb up and half a thumb down, of the mean weight, are added for a response of the mean
    reward, so that b stays finite for ups alone. The derivative rises in b, so its root is
    the minimum.
    """
    from scipy.optimize import brentq  # as above

    mean = float(rewards.mean())
    rewards, good = np.append(rewards, [mean, mean]), np.append(good, [1.0, 0.0])
    weights = np.append(weights, [weights.mean() / 2] * 2)

    def slope(b: float) -> float:
        return float((weights * gradient(rewards, good, b)).sum())

    return float(brentq(slope, rewards.min() - REACH, rewards.max() + REACH, xtol=1e-12))
