"""Numbers worked by hand, and Krippendorff's own example."""

from functools import cache
from itertools import permutations, product

import numpy as np
import pytest

from labeling_app.rankings.agreement import (
    MIN_VALUES,
    longer_wins,
    mean_interval,
    mean_ranks,
    ordinal_alpha,
    pair_agreement,
    ranking_alpha,
    ranks,
    tau_b,
    top_share_by_position,
)
from rlhf.run.intervals import MIN_PROMPTS


def test_ranks():
    assert ranks([["b"], ["a", "c"]]) == {"b": 1, "a": 2, "c": 2}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([["a"], ["b"], ["c"]], [["a"], ["b"], ["c"]], 1.0),
        ([["a"], ["b"], ["c"]], [["c"], ["b"], ["a"]], 0.0),
        # a>b agrees; a>c against a=c: 1/2; b>c against c>b: 0
        ([["a"], ["b"], ["c"]], [["a", "c"], ["b"]], 0.5),
        ([["a", "b"]], [["a", "b"]], 1.0),
        ([["a"], ["b"], ["c"]], [["b"], ["d"], ["a"]], 0.0),  # only a and b are common
        ([["a"], ["b"]], [["b"], ["c"]], None),
    ],
)
def test_pair_agreement(first, second, expected):
    assert pair_agreement(first, second) == expected
    assert pair_agreement(second, first) == expected


def test_tau_b():
    # Pairs ab, ac, bc. First: + + +; second (a=c > b): + 0 -. Concordant 1, discordant 1, so 0.
    assert tau_b([["a"], ["b"], ["c"]], [["a", "c"], ["b"]]) == 0.0
    # Four responses, one swap: 5 concordant, 1 discordant of 6: 4/6.
    assert tau_b([["a"], ["b"], ["c"], ["d"]], [["a"], ["b"], ["d"], ["c"]]) == pytest.approx(4 / 6)
    # a>b=c against a>b>c: P=2, Q=0, ties in x 1: 2 / sqrt((3-1)*3) = 0.8165
    assert tau_b([["a"], ["b", "c"]], [["a"], ["b"], ["c"]]) == pytest.approx(2 / 6**0.5)
    assert tau_b([["a", "b"]], [["a"], ["b"]]) is None


# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section C and E:
# four observers, twelve units, missing values; ordinal alpha 0.815.
OBSERVERS = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3],
    [0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0],
]


def test_krippendorffs_example():
    units = [[row[unit] for row in OBSERVERS if row[unit]] for unit in range(12)]
    assert ordinal_alpha(units) == pytest.approx(0.815, abs=0.0005)


def test_alpha_by_hand():
    assert ordinal_alpha([[1, 1], [2, 2]]) == 1.0
    # Values 1,2 | 1,2: n1 = n2 = 2, each distance equal. D_o = 4/4 = 1 (all pairs differ),
    # D_e = 2*2*2 / (4*3) = 2/3, so alpha = 1 - 3/2 = -0.5.
    assert ordinal_alpha([[1, 2], [1, 2]]) == pytest.approx(-0.5)
    assert ordinal_alpha([[1], [2]]) is None
    assert ordinal_alpha([[1, 1], [1, 1]]) is None


def strict(order: str) -> list[list[str]]:
    return [[name] for name in order]


def test_rankings_by_chance_have_no_alpha_whatever_their_lengths():
    # Everything that two people can say of two and of three responses, each once. Both marginals
    # are uniform, so D_o = D_e · (n - 1) / n and alpha = 1/n of n values: 16 of the pairs of two
    # people on two responses, 216 on three.
    tasks = [
        [strict(a), strict(b)]
        for names in ("ab", "abc")
        for a in permutations(names)
        for b in permutations(names)
    ]
    assert ranking_alpha(tasks[:4]) == (pytest.approx(1 / 16), None, None)  # of four tasks
    assert ranking_alpha(tasks[4:])[0] == pytest.approx(1 / 216)
    assert ranking_alpha(tasks)[0] == pytest.approx((16 / 16 + 216 / 216) / (16 + 216))


def test_alpha_takes_rankings_of_other_responses_for_nothing():
    whole, part = strict("abcd"), strict("cd")  # c and d are third and fourth, or first and second
    assert ranking_alpha([[whole, part]]) is None
    assert ranking_alpha([[whole, whole, part]]) == (1.0, None, None)
    assert ranking_alpha([[whole], []]) is None


def test_tied_responses_share_their_mean_rank_in_alpha():
    tied = [["a", "b", "c"], ["d"]]
    assert mean_ranks(tied) == {"a": 2, "b": 2, "c": 2, "d": 4}
    # Values 1,2 | 2,2 | 3,2 | 4,4: n = 1, 4, 1, 2, with middles 0.5, 3, 5.5, 7.
    # D_o: 2 · 2.5² + 2 · 2.5² = 25. D_e: 2 (4·6.25 + 4·6.25 + 25 + 8·16 + 2·42.25 + 2·2.25) / 7.
    assert ranking_alpha([[strict("abcd"), tied]])[0] == pytest.approx(1 - 25 / (584 / 7))


def test_the_interval_of_alpha_is_that_of_a_binomial_where_tasks_are_coins():
    # Two people order two responses alike in 8 tasks and differ in 2: of 4 T values half are 1, so
    # that alpha = 1 - d (4 T - 1) / 2 T = 1 - 1.95 d for a share d of tasks on which they differ.
    # 10 d of a resample is binomial with p = 0.2: P(0) = .107; P(< 5) = .967 and P(< 6) = .994.
    alike, differ = [strict("ab"), strict("ab")], [strict("ab"), strict("ba")]
    found = ranking_alpha([alike] * 8 + [differ] * 2, samples=10_000)
    assert found == pytest.approx((1 - 1.95 * 0.2, 1 - 1.95 * 0.5, 1.0))
    # Nobody differs: Wilson's interval from -1 to 1, as of tau-b below.
    assert ranking_alpha([alike] * 5) == pytest.approx((1.0, 0.1311, 1.0), abs=1e-4)
    assert ranking_alpha([alike] * 4) == (1.0, None, None)
    assert ranking_alpha([[[["a", "b"]]] * 2] * 5) is None


def alpha_by_definition(units: list[list[float]]) -> float:
    """1 - D_o / D_e of Krippendorff (2011), section E, as sums over pairs of values."""
    values = np.array([value for unit in units for value in unit])

    def distance(c: float, k: float) -> float:
        inside = ((values >= min(c, k)) & (values <= max(c, k))).sum()
        return float(inside - ((values == c).sum() + (values == k).sum()) / 2) ** 2

    observed = sum(
        sum(distance(c, k) for c in unit for k in unit) / (len(unit) - 1) for unit in units
    )
    expected = sum(distance(c, k) for c in values for k in values) / (len(values) - 1)
    return 1 - observed / expected if expected else np.nan


def test_the_interval_of_alpha_is_that_of_all_resamples():
    """The 5⁵ resamples of five tasks, each as likely as another, with alpha by its definition."""
    tasks = [
        [strict("abc"), strict("abc"), strict("acb")],
        [strict("abc"), [["a", "b"], ["c"]]],
        [strict("cab"), strict("acb")],
        [strict("ab"), strict("ab")],
        [strict("ab"), strict("ba")],
    ]
    units = [[[mean_ranks(one)[name] for one in task] for name in mean_ranks(task[0])]
             for task in tasks]  # fmt: skip

    @cache
    def alpha(drawn: tuple[int, ...]) -> float:
        threes, twos = ([unit for task in drawn if (task < 3) is is_three for unit in units[task]]
                        for is_three in (True, False))  # fmt: skip
        known = [(alpha_by_definition(of), sum(map(len, of))) for of in (threes, twos) if of]
        return sum(alpha * number for alpha, number in known) / sum(n for _, n in known)

    value, low, high = ranking_alpha(tasks, samples=50_000)
    assert value == pytest.approx(alpha((0, 1, 2, 3, 4)))
    alphas = [alpha(tuple(sorted(drawn))) for drawn in product(range(5), repeat=5)]
    assert (low, high) == pytest.approx(np.quantile(alphas, (0.025, 0.975)), abs=0.01)


def test_intervals():
    assert mean_interval([]) is None
    assert mean_interval([1.0, 0.5, 1.0, 1.0]) == (0.875, None, None)  # too few to resample
    assert MIN_VALUES == MIN_PROMPTS == 5
    mean, low, high = mean_interval([0.0, 1.0] * 200)
    # The mean of 400 coin flips has standard error 0.025: 0.5 ± 0.049.
    assert mean == 0.5
    assert low == pytest.approx(0.451, abs=0.01)
    assert high == pytest.approx(0.549, abs=0.01)


def test_answers_that_are_all_alike_have_an_interval_too():
    """Wilson's, whose ends are where z = 1.96 standard errors of the end itself reach the share."""
    # 5 of 5: 1 - p = 1.96 sqrt(p (1 - p) / 5), so that p = 5 / (5 + 1.96²) = 0.566.
    assert mean_interval([1.0] * 5) == pytest.approx((1.0, 0.5655, 1.0), abs=1e-4)
    assert mean_interval([0.0] * 5) == pytest.approx((0.0, 0.0, 0.4345), abs=1e-4)
    # Half of 5: |0.5 - p| = 1.96 sqrt(p (1 - p) / 5).
    mean, low, high = mean_interval([0.5] * 5)
    assert (mean, low + high) == pytest.approx((0.5, 1.0))
    assert 0.5 - low == pytest.approx(1.959964 * (low * (1 - low) / 5) ** 0.5, rel=1e-6)
    # Of a coefficient, from -1 to 1: 1 is the share 1, and 0.566 of the way is 0.131.
    assert mean_interval([1.0] * 5, lowest=-1.0) == pytest.approx((1.0, 0.1311, 1.0), abs=1e-4)


def test_position_bias():
    rankings = [
        ([["a"], ["b"]], ["a", "b"]),  # shown first, put first
        ([["a"], ["b"]], ["b", "a"]),  # shown second, put first
        ([["a", "b"]], ["a", "b"]),  # a tie: half each
        ([["a"], ["b"]], ["a", "b"]),
        ([["a"], ["b"], ["c"]], ["a", "b", "c"]),  # another K: left out
    ]
    assert top_share_by_position(rankings) == [(2.5 / 4, None, None), (1.5 / 4, None, None)]
    assert top_share_by_position([]) == []
    # 400 coin flips: ½ ± 0.049, as above
    first, second = top_share_by_position([rankings[0], rankings[1]] * 200)
    assert first == pytest.approx((0.5, 0.451, 0.549), abs=0.01)
    assert second == pytest.approx((0.5, 0.451, 0.549), abs=0.01)


def test_length_bias():
    lengths = {"a": 10, "b": 5, "c": 5, "d": 20}
    # a>b longer wins; a>c longer wins; a>d shorter wins; b=c tie; b>d shorter; c>d shorter
    assert longer_wins([["a"], ["b", "c"], ["d"]], lengths) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert longer_wins([["b"], ["c"]], lengths) == []
