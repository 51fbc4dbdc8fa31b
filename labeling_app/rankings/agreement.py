"""Agreement between rankings, position bias and length bias: pure functions of tiers.

A ranking is `tiers`: lists of response ids, best first; the responses in one list tie. A pair of
responses counts only where both rankings contain both. Agreement on a pair is 1 for the same
verdict, 1/2 for a tie against a preference, 0 for opposite preferences. Published figures for
pairs: 72.6 % between labelers and 77.3 % with researchers (InstructGPT, arXiv 2203.02155), 63 %
(HH, arXiv 2204.05862).

Letters: T tasks, N of them with one number of responses, V values, S bootstrap samples.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from statistics import fmean

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from rlhf.run.intervals import MIN_PROMPTS, share_of

Tiers = Sequence[Sequence[str]]
Interval = tuple[float, float | None, float | None]
MIN_VALUES = MIN_PROMPTS  # for the same reason


def ranks(tiers: Tiers) -> dict[str, int]:
    """The tier number of every response, best 1: [["b"], ["a", "c"]] → {"b": 1, "a": 2, "c": 2}."""
    return {response: rank for rank, tier in enumerate(tiers, start=1) for response in tier}


def pair_agreement(first: Tiers, second: Tiers) -> float | None:
    """Mean agreement over the pairs that both rank; None when there are none."""
    a, b = ranks(first), ranks(second)
    common = sorted(a.keys() & b.keys())
    credits = [
        1 - abs(_sign(a[j] - a[i]) - _sign(b[j] - b[i])) / 2 for i, j in combinations(common, 2)
    ]
    return fmean(credits) if credits else None


def tau_b(first: Tiers, second: Tiers) -> float | None:
    """Kendall's tau-b over the responses both rank; None when one side is a single tie."""
    a, b = ranks(first), ranks(second)
    common = sorted(a.keys() & b.keys())
    return _tau_b(tuple(a[i] for i in common), tuple(b[i] for i in common))


@lru_cache(maxsize=10_000)  # four responses have 75 orders with ties, which come again and again
def _tau_b(x: tuple[int, ...], y: tuple[int, ...]) -> float | None:
    from scipy.stats import kendalltau  # slow to import, and the board needs no tau

    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(kendalltau(x, y, variant="b").statistic)


def mean_ranks(tiers: Tiers) -> dict[str, float]:
    """The rank of every response, best 1; tied ones share the mean of theirs.

    [["b"], ["a", "c"]] → {"b": 1.0, "a": 2.5, "c": 2.5}: the worst of three stays near rank 3.
    """
    rank: dict[str, float] = {}
    for tier in tiers:
        rank |= dict.fromkeys(tier, len(rank) + (len(tier) + 1) / 2)
    return rank


def ranking_alpha(
    tasks: Iterable[Sequence[Tiers]], *, samples: int = 1000, seed: int = 0
) -> Interval | None:
    """Krippendorff's alpha of rankings: what is judged are responses, the values are their ranks.

    Only rankings of the same responses of a task are compared, because a rank among two responses
    is none among four. For the same reason every number of responses has an alpha of its own;
    the result is their mean, each weighted by its number of values. In one pool, rankings drawn by
    chance would seem to agree: the best of two and the best of nine both have low ranks.

    The interval is the 95 % percentile bootstrap over tasks, the standard one of Zapf et al. (BMC
    Medical Research Methodology 16:93, 2016); with few or equal tasks as in `mean_interval`.

    Args:
        tasks: the rankings of each.
        samples: how often to resample.
        seed: of the resampling.

    Returns:
        Alpha, or None when nothing was judged twice or all values are equal.
    """
    by_size: dict[int, list[tuple[int, list[list[float]]]]] = defaultdict(list)
    number = 0  # of tasks with something that was judged twice
    for rankings in tasks:
        if units_by_size := _units_by_size(rankings):
            for size, units in units_by_size.items():
                by_size[size].append((number, units))
            number += 1
    pools = [
        (np.array([task for task, _ in of]), _coincidences([units for _, units in of]))
        for of in by_size.values()
    ]
    value = float(_mean_alpha(pools, np.ones((1, number)))[0])
    if math.isnan(value):
        return None
    if number < MIN_VALUES:
        return value, None, None
    times = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), samples)
    resampled = _mean_alpha(pools, times.astype(float))
    low, high = map(float, np.nanquantile(resampled, (0.025, 0.975)))
    return (value, low, high) if low < high else _of_equal_values(value, number, lowest=-1.0)


def _units_by_size(rankings: Sequence[Tiers]) -> dict[int, list[list[float]]]:
    """For every response of a task its ranks, by how many responses were ranked with it."""
    of_same: dict[frozenset[str], list[dict[str, float]]] = defaultdict(list)
    for tiers in rankings:
        mean_rank = mean_ranks(tiers)
        of_same[frozenset(mean_rank)].append(mean_rank)
    units: dict[int, list[list[float]]] = defaultdict(list)
    for several in of_same.values():
        if len(several) > 1:
            units[len(several[0])] += [[rank[name] for rank in several] for name in several[0]]
    return units


def _mean_alpha(
    pools: Sequence[tuple[Int[ndarray, " N"], Float[ndarray, "N V V"]]],
    times: Float[ndarray, "S T"],
) -> Float[ndarray, " S"]:
    """The mean of the pools' alphas in each sample of tasks, weighted by values; nan without one.

    Args:
        pools: the tasks of each number of responses, and their coincidences.
        times: how often each task is in each sample.
    """
    total, weight = np.zeros(len(times)), np.zeros(len(times))
    for tasks, coincidences in pools:
        summed = np.tensordot(times[:, tasks], coincidences, axes=1)
        alpha, number = _alpha(summed), summed.sum(axis=(1, 2))
        is_known = ~np.isnan(alpha)
        total += np.where(is_known, alpha * number, 0.0)
        weight += np.where(is_known, number, 0.0)
    mean: Float[ndarray, " S"] = np.full(len(times), np.nan)
    np.divide(total, weight, out=mean, where=weight > 0)
    return mean


def ordinal_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Krippendorff's alpha for ordinal values: 1 perfect, 0 what chance gives.

    α = 1 - D_observed / D_expected with the ordinal distance
    δ²(c, k) = (Σ_{g=c..k} n_g - (n_c + n_k) / 2)². (Krippendorff, Content Analysis, ch. 12)

    Args:
        units: for every thing judged, the values it got, one per judge; single ones are left out.

    Returns:
        Alpha, or None when nothing was judged twice or all values are equal.
    """
    alpha = float(_alpha(_coincidences([units]))[0])
    return None if math.isnan(alpha) else alpha


def _coincidences(groups: Sequence[Sequence[Sequence[float]]]) -> Float[ndarray, "N V V"]:
    """For each group of units how often two judges gave one unit the values c and k."""
    values = sorted({value for units in groups for unit in units for value in unit})
    column = {value: index for index, value in enumerate(values)}
    coincidences = np.zeros((len(groups), len(values), len(values)))
    for group, units in zip(coincidences, groups, strict=True):
        for unit in units:
            if len(unit) > 1:
                counts = np.bincount([column[v] for v in unit], minlength=len(values)).astype(float)
                group += (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)
    return coincidences


def _alpha(coincidences: Float[ndarray, "S V V"]) -> Float[ndarray, " S"]:
    """`ordinal_alpha` of each sample; nan without two values."""
    totals = coincidences.sum(axis=1)
    # Σ_{g=c..k} n_g - (n_c + n_k) / 2 is the distance between the middles of the two classes.
    middles = np.cumsum(totals, axis=1) - totals / 2
    distance = (middles[:, :, None] - middles[:, None, :]) ** 2
    products = totals[:, :, None] * totals[:, None, :]
    expected = (products * distance).sum(axis=(1, 2))
    observed = (coincidences * distance).sum(axis=(1, 2)) * (totals.sum(axis=1) - 1)
    alpha: Float[ndarray, " S"] = 1.0 - np.divide(
        observed, expected, out=np.full(len(totals), np.nan), where=expected > 0
    )
    return alpha


def mean_interval(
    values: Sequence[float], *, lowest: float = 0.0, samples: int = 1000, seed: int = 0
) -> Interval | None:
    """The mean with its 95 % percentile bootstrap interval (Efron, 1979); None without values.

    With fewer than `MIN_VALUES` values there is a mean and no interval. Where all values are equal,
    resampling gives no width, and the interval is that of Wilson (1927) for as many answers.

    Args:
        values: each from `lowest` to 1.
        lowest: the smallest that a value can be.
        samples: how often to resample.
        seed: of the resampling.
    """
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) < MIN_VALUES:
        return mean, None, None
    if len(set(values)) == 1:
        return _of_equal_values(mean, len(values), lowest)
    from scipy.stats import bootstrap  # as above

    rng = np.random.default_rng(seed)
    resampled = bootstrap(
        (values,), np.mean, n_resamples=samples, batch=100, method="percentile", rng=rng
    )
    low, high = map(float, resampled.confidence_interval)
    return mean, low, high


def _of_equal_values(value: float, number: int, lowest: float) -> Interval:
    rate = share_of((value - lowest) / (1 - lowest) * number, number)
    assert rate is not None  # of at least one value
    low, high = (lowest + (1 - lowest) * rate[end] for end in ("low", "high"))
    return value, low, high


def top_share_by_position(rankings: Sequence[tuple[Tiers, Sequence[str]]]) -> list[Interval]:
    """How often the response shown at each position was put on top; a shared top counts in parts.

    Without bias every position of K gets 1/K. Only rankings of the commonest K count. Each share
    has its interval over rankings, as of `mean_interval`.

    Args:
        rankings: (tiers, order shown) of each ranking.
    """
    if not rankings:
        return []
    sizes = [len(shown_order) for _, shown_order in rankings]
    size = max(set(sizes), key=sizes.count)
    used = [(tiers[0], shown_order) for tiers, shown_order in rankings if len(shown_order) == size]
    credits = [
        [(response in top) / len(top) for response in shown_order] for top, shown_order in used
    ]
    shares = (mean_interval(of_position) for of_position in zip(*credits, strict=True))
    return [share for share in shares if share is not None]


def longer_wins(tiers: Tiers, lengths: dict[str, int]) -> list[float]:
    """For every strict pair of unequal length: 1 where the longer response won, else 0."""
    rank = ranks(tiers)
    return [
        float((rank[i] < rank[j]) == (lengths[i] > lengths[j]))
        for i, j in combinations(rank, 2)
        if rank[i] != rank[j] and lengths[i] != lengths[j]
    ]


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
