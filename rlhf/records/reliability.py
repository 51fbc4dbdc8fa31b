"""How reliable each annotator is, estimated from agreement on what several people judged.

The one-coin model of Dawid and Skene (Applied Statistics 28(1), 1979, eqs. 2.3-2.5): annotator j is
right about every pair of responses with probability a_j. The order of two responses means nothing,
so both answers are equally likely a priori and both kinds of errors have one probability. EM starts
at the majority vote, which is assumed to be right more often than not.

Differs from the paper: one number in place of a confusion matrix, and one right and one wrong
judgment added to everybody's count, a Beta(2, 2) prior (Raykar et al., JMLR 11, 2010, section 3),
so that few judgments stay near chance. Ties are left out: where the chance of a tie does not depend
on which response is better, ties cancel from the posterior.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

TOLERANCE = 1e-7  # of reliability, between two steps of EM
MOST_STEPS = 1000

Item = tuple[str, str, str]  # what was judged, and two of its responses in the order of their ids


@dataclass(frozen=True)
class Vote:
    """An annotator's preference between the two responses of an item."""

    item: Item
    annotator: str
    first_wins: bool


@dataclass(frozen=True)
class Reliability:
    """The probability that an annotator's preference is right, and its 95 % interval.

    `shared` counts the judged pairs that somebody else judged, too. Where there are none, `value`
    is the mean of the others' and there is no interval. The interval takes the estimated number of
    right judgments as counted, and pairs of one ranking as independent.
    """

    value: float
    low: float | None
    high: float | None
    shared: int


def votes_of(judged: str, annotator: str, tiers: Sequence[Sequence[str]]) -> Iterator[Vote]:
    """Every preference of one ranking.

    Args:
        judged: the prompt or task.
        annotator: who ranked.
        tiers: ids of responses, best first.
    """
    for place, tier in enumerate(tiers):
        others = [name for worse in tiers[place + 1 :] for name in worse]
        for winner, loser in product(tier, others):
            first, second = sorted((winner, loser))
            yield Vote((judged, first, second), annotator, winner == first)


def reliability_of_shared(votes: Sequence[Vote]) -> dict[str, Reliability]:
    """The reliability of everybody who judged the same two responses as somebody else, by name."""
    judges: dict[Item, set[str]] = defaultdict(set)
    for vote in votes:
        judges[vote.item].add(vote.annotator)
    shared = [vote for vote in votes if len(judges[vote.item]) > 1]
    if not shared:
        return {}
    who, annotator = np.unique([vote.annotator for vote in shared], return_inverse=True)
    numbers = {item: number for number, item in enumerate(dict.fromkeys(v.item for v in shared))}
    item = np.array([numbers[vote.item] for vote in shared])
    sign = np.array([1.0 if vote.first_wins else -1.0 for vote in shared])
    accuracy = run_em(item, annotator, sign)
    counts = np.bincount(annotator)
    return {
        str(name): _with_interval(float(value), int(count))
        for name, value, count in zip(who, accuracy, counts, strict=True)
    }


def run_em(
    item: Int[ndarray, " V"],
    annotator: Int[ndarray, " V"],
    sign: Float[ndarray, " V"],
    most_steps: int = MOST_STEPS,
) -> Float[ndarray, " A"]:
    """The accuracies a that are most likely given V votes.

    With p_i the probability that the first response of item i is the better one, and y = ±1 a vote
    for the first or the second:

        M: a_j = (1 + Σ_i P(y_ij is right)) / (2 + n_j)
        E: p_i = σ(Σ_j y_ij · log(a_j / (1 − a_j)))

    Args:
        item: of each vote, counted from 0.
        annotator: of each vote, counted from 0.
        sign: of each vote: 1 where the first response wins, else -1.
        most_steps: after which it ends at the latest.
    """
    from scipy.special import expit, logit  # slow to import, and absent on a rented GPU

    number = np.bincount(annotator)
    posterior = np.bincount(item, sign > 0) / np.bincount(item)  # the share of votes for the first
    accuracy = np.full(len(number), 0.5)
    for _ in range(most_steps):
        right = np.where(sign > 0, posterior[item], 1 - posterior[item])
        before, accuracy = accuracy, (1 + np.bincount(annotator, right)) / (2 + number)
        if np.abs(accuracy - before).max() < TOLERANCE:
            break
        posterior = expit(np.bincount(item, sign * logit(accuracy)[annotator]))
    return accuracy


def _with_interval(value: float, number: int) -> Reliability:
    from scipy.stats import binomtest  # as above

    interval = binomtest(round(value * number), number).proportion_ci(method="wilson")
    return Reliability(value, float(interval.low), float(interval.high), number)
