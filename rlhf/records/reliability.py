"""How reliable each annotator is, estimated from agreement on what several people judged.

The one-coin model of Dawid and Skene (Applied Statistics 28(1), 1979, eqs. 2.3-2.5): annotator j is
right about every pair of responses with probability a_j. The order of two responses means nothing,
so both answers are equally likely a priori and both kinds of errors have one probability. EM starts
at the majority vote, which is assumed to be right more often than not.

Differs from the paper: one number in place of a confusion matrix, and one right and one wrong
judgment added to everybody's count, a Beta(2, 2) prior (Raykar et al., JMLR 11, 2010, section 3),
so that few judgments stay near chance. Ties are left out: where the chance of a tie does not depend
on which response is better, ties cancel from the posterior.

Intervals are of the profile likelihood: every a_j for which some accuracies of the others explain
the labels nearly as well. Nobody knows the truth, so agreement alone often leaves open who of two
is right more often, and then both intervals are wide. Pairs of one ranking are not independent: the
likelihood counts for as much less as they resemble each other, the design effect of Rao and Scott
(Journal of the American Statistical Association 76, 1981).

Letters: I items, J annotators, N labels.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

TOLERANCE = 1e-7  # of reliability, between two steps of EM
MOST_STEPS = 1000
LEVEL = 0.95
EDGE = 1e-3  # the share of a or of 1 − a beyond which an interval goes to 0 or 1
PROFILE_TOLERANCE = 1e-5
PROFILE_STEPS = 200
WALK = 20  # steps to the end of an interval
END_TOLERANCE = 1e-3

Item = tuple[str, str, str]  # what was judged, and two of its responses in the order of their ids


@dataclass(frozen=True)
class PairLabel:
    """An annotator's label of an item: which of its two responses is the better one."""

    item: Item
    annotator: str
    first_wins: bool


@dataclass(frozen=True)
class Reliability:
    """The probability that an annotator's preference is right, and its 95 % interval.

    `shared` counts the judged pairs that somebody else judged, too. Where there are none, `value`
    is the mean of the others' and there is no interval.
    """

    value: float
    low: float | None
    high: float | None
    shared: int


def labels_of(judged: str, annotator: str, tiers: Sequence[Sequence[str]]) -> Iterator[PairLabel]:
    """The labels that one ranking gives: which response of each pair is above the other.

    Args:
        judged: the prompt or task.
        annotator: who ranked.
        tiers: ids of responses, best first.
    """
    for rank, tier in enumerate(tiers):
        others = [name for worse in tiers[rank + 1 :] for name in worse]
        for winner, loser in product(tier, others):
            first, second = sorted((winner, loser))
            yield PairLabel((judged, first, second), annotator, winner == first)


def reliability_of_shared(labels: Sequence[PairLabel]) -> dict[str, Reliability]:
    """The reliability of everybody who judged the same two responses as somebody else, by name."""
    from scipy.sparse import csr_array  # slow to import, and absent on a rented GPU

    judges: dict[Item, set[str]] = defaultdict(set)
    for label in labels:
        judges[label.item].add(label.annotator)
    shared = [label for label in labels if len(judges[label.item]) > 1]
    if not shared:
        return {}
    who, annotator = np.unique([label.annotator for label in shared], return_inverse=True)
    numbers = {
        item: number for number, item in enumerate(dict.fromkeys(label.item for label in shared))
    }
    item = np.array([numbers[label.item] for label in shared])
    sign = np.array([1.0 if label.first_wins else -1.0 for label in shared])
    accuracy = run_em(item, annotator, sign)
    signs = csr_array((sign, (item, annotator)), (len(numbers), len(who)))
    _, judged = np.unique([task for task, _, _ in numbers], return_inverse=True)
    return {
        str(name): Reliability(float(value), *interval, int(count))
        for name, value, interval, count in zip(
            who,
            accuracy,
            find_intervals(signs, judged, accuracy),
            np.bincount(annotator),
            strict=True,
        )
    }


def run_em(
    item: Int[ndarray, " N"],
    annotator: Int[ndarray, " N"],
    sign: Float[ndarray, " N"],
    most_steps: int = MOST_STEPS,
) -> Float[ndarray, " A"]:
    """The accuracies a that are most likely given N labels.

    With p_i the probability that the first response of item i is the better one, and y = ±1 a label
    for the first or the second:

        M: a_j = (1 + Σ_i P(y_ij is right)) / (2 + n_j)
        E: p_i = σ(Σ_j y_ij · log(a_j / (1 − a_j)))

    Args:
        item: of each label, counted from 0.
        annotator: of each label, counted from 0.
        sign: of each label: 1 where the first response wins, else -1.
        most_steps: after which it ends at the latest.
    """
    from scipy.special import expit, logit  # as above

    number = np.bincount(annotator)
    posterior = np.bincount(item, sign > 0) / np.bincount(item)  # the share of labels for the first
    accuracy = np.full(len(number), 0.5)
    for _ in range(most_steps):
        right = np.where(sign > 0, posterior[item], 1 - posterior[item])
        before, accuracy = accuracy, (1 + np.bincount(annotator, right)) / (2 + number)
        if np.abs(accuracy - before).max() < TOLERANCE:
            break
        posterior = expit(np.bincount(item, sign * logit(accuracy)[annotator]))
    return accuracy


def find_intervals(
    signs: "csr_array", judged: Int[ndarray, " I"], accuracy: Float[ndarray, " J"]
) -> list[tuple[float, float]]:
    """For every annotator the interval of 95 % around the accuracy that `run_em` has found.

    It ends where 2 (log L − log L_j(v)) = D_j · χ²(.95), with L_j(v) the highest posterior density
    where a_j = v, and D_j the design effect; at 0 or 1 if that is nowhere.

    Args:
        signs: 1 or -1 of each label as in `run_em`, a row for each item, a column for each person.
        judged: the prompt or task of each item, counted from 0.
        accuracy: a.
    """
    from scipy.stats import chi2  # as above

    patterns, counts = _distinct_rows(signs)
    highest = _log_posterior(patterns, counts, accuracy)
    allowed = chi2.ppf(LEVEL, 1) / 2 * _design_effects(signs, judged, accuracy)

    def end(annotator: int, last: float, beyond: float) -> float:
        best = accuracy

        def left(v: float) -> float:
            nonlocal best  # the next v is near
            best = _fit_others(patterns, counts, best, annotator, v)
            return float(_log_posterior(patterns, counts, best) - highest + allowed[annotator])

        return _find_end(left, float(accuracy[annotator]), last, beyond)

    return [
        (end(number, EDGE * a, 0.0), end(number, 1 - EDGE * (1 - a), 1.0))
        for number, a in enumerate(accuracy.tolist())
    ]


def _distinct_rows(signs: "csr_array") -> tuple["csr_array", Int[ndarray, " U"]]:
    """Items on which the same people agree and differ, once each, and how many there are."""
    signs.sort_indices()
    starts = signs.indptr[:-1]
    with_first = signs.data == signs.data[starts].repeat(np.diff(signs.indptr))
    rows = np.split(2 * signs.indices + with_first, starts[1:])
    names = [row.tobytes() for row in rows]
    indices = {name: index for index, name in enumerate(names)}
    counts = Counter(names)
    return signs[list(indices.values())], np.array([counts[name] for name in indices])


def _find_end(left: Callable[[float], float], inside: float, last: float, beyond: float) -> float:
    """Where `left` first falls below 0 on the way to `last`; `beyond` if it does not.

    First, because accuracies of 1 − a explain all labels as well as a: everybody wrong for right.
    Two fits at one place differ a little: no place is asked about twice.
    """
    for outside in np.linspace(inside, last, WALK + 1)[1:].tolist():
        if left(outside) < 0:
            break
        inside = outside
    else:
        return beyond
    while abs(outside - inside) > END_TOLERANCE:
        middle = (inside + outside) / 2
        if left(middle) < 0:
            outside = middle
        else:
            inside = middle
    return float(inside + outside) / 2


def _log_posterior(
    patterns: "csr_array", counts: Int[ndarray, " U"], accuracy: Float[ndarray, " J"]
) -> float:
    """Σ_j (n_j / 2 + 1) log a_j (1 − a_j) + Σ_u c_u log cosh(l_u / 2).

    l are the log-odds of the E step. This is the density that `run_em` makes highest: an item's
    labels have the likelihood ½ Π_j P(right) + ½ Π_j P(wrong), by which of the two responses wins.
    """
    from scipy.special import logit

    odds = patterns @ logit(accuracy)
    number = counts @ abs(patterns)
    spread = np.logaddexp(odds / 2, -odds / 2) - np.log(2)
    return float((number / 2 + 1) @ np.log(accuracy * (1 - accuracy)) + counts @ spread)


def _fit_others(
    patterns: "csr_array",
    counts: Int[ndarray, " U"],
    accuracy: Float[ndarray, " J"],
    annotator: int,
    v: float,
) -> Float[ndarray, " J"]:
    """The most likely accuracies with that of one annotator fixed at v: EM as in `run_em`.

    It begins with `accuracy`.
    """
    from scipy.special import expit, logit

    number = counts @ abs(patterns)
    fitted = accuracy.copy()
    fitted[annotator] = v
    for _ in range(PROFILE_STEPS):
        lead = expit(patterns @ logit(fitted)) - 0.5
        before, fitted = fitted, (1 + number / 2 + (counts * lead) @ patterns) / (2 + number)
        fitted[annotator] = v
        if np.abs(fitted - before).max() < PROFILE_TOLERANCE:
            break
    return fitted


def _design_effects(
    signs: "csr_array", judged: Int[ndarray, " I"], accuracy: Float[ndarray, " J"]
) -> Float[ndarray, " J"]:
    """By how much the variance of Σ_i (P(y_ij is right) − a_j) exceeds that of independent items.

    At least 1; with the sum over items of each prompt or task in the place of single items.
    """
    from scipy.sparse import csr_array
    from scipy.special import expit, logit

    item, annotator = signs.nonzero()
    right = expit(signs.data * (signs @ logit(accuracy))[item])
    surplus = right - accuracy[annotator]
    number = int(judged.max()) + 1
    sums = csr_array((surplus, (judged[item], annotator)), (number, len(accuracy)))
    together, alone = sums.power(2).sum(axis=0), np.bincount(annotator, surplus**2)
    # no variance where a person's labels say nothing, as two people's who differ on all they share
    ratio = np.divide(together, alone, out=np.zeros_like(alone), where=alone > 0)
    effects: Float[ndarray, " J"] = np.maximum(ratio * number / max(number - 1, 1), 1)
    return effects
