"""b, the reward from which on a source of thumbs says "good", fitted for every source.

A source is an annotator: a person, or a program that passes on the thumbs of its users. Those who
gave fewer than MIN_OF_EACH ups or downs have one b together; where all of theirs say the same, no b
explains them best, and the mean reward of all judged responses stands for it.

b is a number beside the network, the same in every process:

* Before the first step and after the last one it is fitted exactly, on up to MEMORY thumbs of each
  source (`solve`). The last fit is for the weights that are saved, and stands in report.json.
* After every step b ← b − 4·ḡ·f, with ḡ the mean gradient of the step's n thumbs and f their part
  n / min(N, MEMORY) of the latest ones, at most 1; N counts all so far. The curvature of −log σ is
  at most ¼, so 4·ḡ cannot overshoot (Böhning and Lindsay, 1988), and f makes b an average over the
  last MEMORY thumbs. b and N are in the checkpoints, in progress.json.

It is no parameter of the optimizer: at the learning rates of the weights, about 1e-5, it would not
move, a rate of its own would have to be chosen, and every sharding and adapter would have to carry
it. Minimising over b within each batch would be wrong: a batch of one thumb, or of ups alone, would
have no gradient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor

from reward.groups import Group, Pointwise, take_part

MIN_OF_EACH = 8
MEMORY = 256
STEP = 4.0  # 1 / the largest curvature of −log σ
REACH = 50.0  # b stands less than log(number of thumbs) beyond their rewards
OTHERS = ""  # no annotator has this name


@final
class Thresholds:
    """b of every source; without pointwise judgements there is no source.

    Args:
        train: groups to train on, whose judgements decide who is a source alone.
        others: groups that are only measured.
    """

    def __init__(self, train: Sequence[Group] = (), others: Sequence[Group] = ()) -> None:
        counts = Counter((one.annotator, one.is_good) for g in train for one in g.pointwise)
        names = {one.annotator for group in (*train, *others) for one in group.pointwise}
        own = {n for n in names if min(counts[n, True], counts[n, False]) >= MIN_OF_EACH}
        self.sources = [*sorted(own), *([OTHERS] if names - own else [])]
        self.values = dict.fromkeys(self.sources, 0.0)
        self._seen = dict.fromkeys(self.sources, 0)
        self._places = {name: place for place, name in enumerate(self.sources)}
        said = {good for name, good in counts if name not in own}
        self._fitted = own | ({OTHERS} if len(said) == 2 else set())

    def source(self, annotator: str) -> str:
        """Whose b is that of an annotator: her own, or that of OTHERS."""
        return annotator if annotator in self._places else OTHERS

    def is_fitted(self, source: str) -> bool:
        """False where the mean reward stands for b."""
        return source in self._fitted

    def numbers(self, groups: Sequence[Group]) -> Int[Tensor, " T"]:
        """The number of the source of every pointwise judgement of some groups, in order."""
        names = [self.source(one.annotator) for group in groups for one in group.pointwise]
        return torch.tensor([self._places[name] for name in names], dtype=torch.long)

    def of(self, groups: Sequence[Group]) -> Float[Tensor, " T"]:
        """The b of every pointwise judgement of some groups, in order."""
        values = torch.tensor(list(self.values.values()), dtype=torch.float32)
        return values[self.numbers(groups)]

    def tally(
        self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]
    ) -> Float[Tensor, "S 3"]:
        """What a pass tells about b: Σ w·gradient, Σ w, and how many, for every source.

        Sums of several passes and processes add up; `move` takes the sum.
        """
        found = np.zeros((len(self.sources), 3))
        for place, source in enumerate(self.sources):
            b = self.values[source]
            if self.is_fitted(source):
                values, good, weights = self._judged(source, groups, rewards)
                gradients = STEP * weights * gradient(values, good, b)
                found[place] = gradients.sum(), weights.sum(), len(values)
            else:
                every = [value for row in rewards for value in row]
                found[place] = sum(b - value for value in every), len(every), len(every)
        return torch.from_numpy(found)

    def move(self, sums: Float[Tensor, "S 3"]) -> None:
        """Follow one step's rewards, given the sum of what all passes and processes tallied."""
        for source, (change, weight, count) in zip(self.sources, sums.tolist(), strict=True):
            if count:
                self._seen[source] += round(count)
                share = count / max(count, min(self._seen[source], MEMORY))
                self.values[source] -= change / weight * share

    def sample(self, groups: Sequence[Group]) -> list[Group]:
        """Groups that `fit` wants scored: for every source, MEMORY that tell about it."""
        ids: set[str] = set()
        for source in self.sources:
            telling = [
                group
                for group in groups
                if not self.is_fitted(source)
                or any(self.source(one.annotator) == source for one in group.pointwise)
            ]
            ids.update(group.prompt_id for group in take_part(telling, MEMORY))
        return [group for group in groups if group.prompt_id in ids]

    def fit(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> None:
        """Set every b to its best value for some rewards."""
        every = [value for row in rewards for value in row]
        for source in self.sources:
            judged = self._judged(source, groups, rewards)
            if self.is_fitted(source) and len(judged[0]):
                self.values[source], self._seen[source] = solve(*judged), len(judged[0])
            elif every:
                self.values[source], self._seen[source] = float(np.mean(every)), len(every)

    def state(self) -> dict[str, list[float]]:
        """Each b and how many judgements it has seen, for a checkpoint."""
        return {source: [self.values[source], self._seen[source]] for source in self.sources}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a checkpoint's state."""
        for source in self.sources:
            value, seen = state[source]
            self.values[source], self._seen[source] = value, round(seen)

    def _judged(
        self, source: str, groups: Sequence[Group], rewards: Sequence[Sequence[float]]
    ) -> tuple[ndarray, ndarray, ndarray]:
        """Reward, verdict and weight of every judgement by a source."""
        told: list[tuple[float, Pointwise]] = [
            (values[one.response], one)
            for group, values in zip(groups, rewards, strict=True)
            for one in group.pointwise
            if self.source(one.annotator) == source
        ]
        return (
            np.array([value for value, _ in told], dtype=np.float64),
            np.array([one.is_good for _, one in told], dtype=np.float64),
            np.array([one.weight for _, one in told], dtype=np.float64),
        )


def gradient(
    rewards: Float[ndarray, " T"], good: Float[ndarray, " T"], b: float
) -> Float[ndarray, " T"]:
    """Derivative by b of −log σ(r − b) where good is 1, of −log σ(b − r) where it is 0."""
    found: Float[ndarray, " T"] = good - expit(rewards - b)
    return found


def solve(
    rewards: Float[ndarray, " T"], good: Float[ndarray, " T"], weights: Float[ndarray, " T"]
) -> float:
    """argmin_b Σ_i w_i·(−log σ(±(r_i − b))), + for good responses and − for bad ones.

    Half a thumb up and half a thumb down for a response of the mean reward are added, of the mean
    weight: b stays finite where a sample holds ups alone. The derivative rises in b, so its root is
    the minimum.
    """
    mean = float(rewards.mean())
    rewards, good = np.append(rewards, [mean, mean]), np.append(good, [1.0, 0.0])
    weights = np.append(weights, [weights.mean() / 2] * 2)

    def slope(b: float) -> float:
        return float((weights * gradient(rewards, good, b)).sum())

    return float(brentq(slope, rewards.min() - REACH, rewards.max() + REACH, xtol=1e-12))
