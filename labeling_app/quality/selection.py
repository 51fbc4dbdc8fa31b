"""Which tasks a reward model would learn most from: functions of rewards and features.

A task holds K responses with rewards r (K) and features φ (K, d), the input of the reward head. A
person who ranks it compares all pairs; the model expects p = σ(r_i - r_j) of each.

* entropy: the model's mean uncertainty about the pairs.
* fisher: how much the pairs would tell about the head, given what was ranked before (D-optimal,
  arXiv 2502.04354). Tasks are chosen greedily, so that two with the same content are not both
  first.
* delta-ucb: the largest plausible gap (arXiv 2603.09692). The paper adds the bounds of the two
  responses; here the bound is on their difference, because only differences are learned.

A share of the queue is always drawn at random, because a model does not know what it has not seen.
"""

from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray

Method = Literal["entropy", "fisher", "delta-ucb"]
# Further picks would change the order of what nobody reaches before the next round.
ONE_BY_ONE = 500


def gaps(rewards: Float[ndarray, " K"]) -> Float[ndarray, " P"]:
    """r_i - r_j of all P = K(K-1)/2 pairs, i < j."""
    i, j = np.triu_indices(len(rewards), 1)
    return np.asarray(rewards[i] - rewards[j])


def differences(features: Float[ndarray, "K d"]) -> Float[ndarray, "P d"]:
    """φ_i - φ_j of all pairs, i < j."""
    i, j = np.triu_indices(len(features), 1)
    return np.asarray(features[i] - features[j])


def pair_entropy(rewards: Float[ndarray, " K"]) -> float:
    """Mean entropy, in nats, of the model's verdict on a pair: ln 2 when it cannot tell."""
    gap = np.abs(gaps(rewards))
    # H(σ(g)) = log(1 + e^-g) + g e^-g / (1 + e^-g), which no gap overflows.
    small = np.exp(-gap)
    return float(np.mean(np.log1p(small) + gap * small / (1 + small)))


def information(
    rewards: Float[ndarray, " K"], features: Float[ndarray, "K d"]
) -> Float[ndarray, "P d"]:
    """A with AᵀA = Σ p(1-p)(φ_i - φ_j)(φ_i - φ_j)ᵀ, the Fisher information of all pairs."""
    small = np.exp(-np.abs(gaps(rewards)))
    return np.asarray(np.sqrt(small)[:, None] / (1 + small)[:, None] * differences(features))


def gain(rows: Float[ndarray, "P d"], covariance: Float[ndarray, "d d"]) -> float:
    """The information that pairs add, in nats: log det(I + A Σ Aᵀ), Σ the inverse of the known."""
    return float(np.linalg.slogdet(np.eye(len(rows)) + rows @ covariance @ rows.T)[1])


def learn(rows: Float[ndarray, "P d"], covariance: Float[ndarray, "d d"]) -> Float[ndarray, "d d"]:
    """The covariance after those pairs were ranked: (Σ⁻¹ + AᵀA)⁻¹."""
    seen = rows @ covariance
    inner = np.eye(len(rows)) + seen @ rows.T
    return np.asarray(covariance - seen.T @ np.linalg.solve(inner, seen))


def largest_plausible_gap(
    rewards: Float[ndarray, " K"],
    features: Float[ndarray, "K d"],
    covariance: Float[ndarray, "d d"],
    beta: float = 1.0,
) -> float:
    """The largest |r_i - r_j| + β √((φ_i - φ_j)ᵀ Σ (φ_i - φ_j)) of all pairs."""
    difference = differences(features)
    variance = np.einsum("pd,de,pe->p", difference, covariance, difference)
    return float(np.max(np.abs(gaps(rewards)) + beta * np.sqrt(np.maximum(variance, 0))))


def choose_one_by_one(
    tasks: list[Float[ndarray, "P d"]], covariance: Float[ndarray, "d d"], most: int = ONE_BY_ONE
) -> list[tuple[int, float]]:
    """(task, gain) in the order in which each adds most to those before; after `most`, as it is.

    A gain can only shrink as more is known, so a task whose recomputed gain is still the largest is
    the best of all.
    """
    heap = [(-gain(rows, covariance), task) for task, rows in enumerate(tasks)]
    heapify(heap)
    chosen: list[tuple[int, float]] = []
    while heap and len(chosen) < most:
        _, task = heappop(heap)
        fresh = gain(tasks[task], covariance)
        if heap and fresh < -heap[0][0]:
            heappush(heap, (-fresh, task))
        else:
            chosen.append((task, fresh))
            covariance = learn(tasks[task], covariance)
    return chosen + [(task, -negative) for negative, task in sorted(heap)]


def mix(order: list[int], share: float, rng: np.random.Generator) -> list[tuple[int, bool]]:
    """(task, drawn at random) such that at least `share` of every beginning is drawn at random."""
    rest = iter(order)
    drawn = iter([order[index] for index in rng.permutation(len(order))])
    taken: set[int] = set()
    mixed: list[tuple[int, bool]] = []
    num_random = 0
    for position in range(1, len(order) + 1):
        is_random = num_random < share * position
        # What one of the two has passed over is taken, so no task is lost.
        task = next(task for task in (drawn if is_random else rest) if task not in taken)
        num_random += is_random
        taken.add(task)
        mixed.append((task, is_random))
    return mixed
