"""The comparison of thumbs: against independent numbers, and how often it errs."""

import math

import numpy as np
import pytest

from policies.serving.thumbs.sequential import Thumbs, difference_interval, log_evidence
from tests.policies.serving.thumbs.evidence import independent_evidence


@pytest.mark.parametrize("thumbs", [(60, 40, 30, 70), (3, 1, 1, 3), (0, 0, 0, 0), (500, 9, 40, 2)])
def test_the_evidence_is_the_mixture_of_likelihood_ratios(thumbs):
    found = math.exp(log_evidence(*map(np.asarray, thumbs)))
    assert found == pytest.approx(independent_evidence(*thumbs), rel=1e-6)


def test_evidence_worked_by_hand():
    # 11 of 12 against 5 of 12: v = (11·1 + 5·7) / 12³ = 46 / 1728, p − p' = 1/2, τ² = 1/100
    v = 46 / 1728
    expected = math.log(v / (v + 0.01)) / 2 + 0.01 * 0.25 / (2 * v * (v + 0.01))
    assert expected == pytest.approx(1.12279, abs=1e-5)
    assert log_evidence(*map(np.asarray, (10, 0, 4, 6))) == pytest.approx(expected)


@pytest.mark.parametrize("level", [0.9, 0.95])
@pytest.mark.parametrize("thumbs", [(60, 40, 30, 70), (12, 3, 200, 180)])
def test_the_ends_of_the_interval_are_the_differences_that_are_just_not_rejected(thumbs, level):
    ends = difference_interval(Thumbs(*thumbs[:2]), Thumbs(*thumbs[2:]), level)
    for end in ends:
        evidence = independent_evidence(*thumbs, difference=end)
        assert evidence == pytest.approx(1 / (1 - level), rel=1e-5)
    assert ends[0] < thumbs[0] / sum(thumbs[:2]) - thumbs[2] / sum(thumbs[2:]) < ends[1]


def test_few_thumbs_decide_nothing():
    assert difference_interval(Thumbs(0, 0), Thumbs(0, 0)) == (-1.0, 1.0)
    low, high = difference_interval(Thumbs(5, 0), Thumbs(0, 5))
    assert low < 0 < high
    assert Thumbs(0, 0).rate is None


def simulate(rate, other, *, share, per_day, days=120, runs=1500):
    """Cumulated thumbs at the end of every day: up, down, and those of the other policy."""
    random = np.random.default_rng(7)
    own = random.binomial(per_day, share, size=(runs, days))
    up = random.binomial(own, rate).cumsum(axis=1)
    other_up = random.binomial(per_day - own, other).cumsum(axis=1)
    return up, own.cumsum(axis=1) - up, other_up, (per_day - own).cumsum(axis=1) - other_up


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("per_day", [2, 40])
def test_looking_every_day_errs_in_at_most_one_of_twenty_comparisons(rate, share, per_day):
    counts = simulate(rate, rate, share=share, per_day=per_day)
    wrong = (log_evidence(*counts) >= math.log(20)).any(axis=1).mean()
    # 1,500 runs: three standard errors of 0.05 are 0.017; measured: 0.045 at most
    assert wrong <= 0.05


def test_the_usual_test_errs_often_if_it_is_looked_at_every_day():
    up, down, other_up, other_down = simulate(0.5, 0.5, share=0.5, per_day=40)
    n, m = up + down, other_up + other_down
    pooled = (up + other_up) / (n + m)
    z = (up / n - other_up / m) / np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    assert (abs(z) > 1.96).any(axis=1).mean() > 0.25


def test_a_real_difference_is_found():
    counts = simulate(0.6, 0.5, share=0.5, per_day=40)
    is_found = (log_evidence(*counts) >= math.log(20)).any(axis=1)
    assert is_found.mean() > 0.95
    up, down, other_up, other_down = (one[is_found][:, -1] for one in counts)
    assert (up / (up + down) > other_up / (other_up + other_down)).all()


@pytest.mark.parametrize(("share", "half", "nine_in_ten"), [(0.5, 560, 1250), (0.1, 1700, 3550)])
def test_how_many_thumbs_a_decision_takes(share: float, half: int, nine_in_ten: int) -> None:
    """The numbers of serving.md: 80 % against 70 % up, looked at after every ten thumbs."""
    counts = simulate(0.8, 0.7, share=1 - share, per_day=10, days=1500)
    is_found = log_evidence(*counts) >= math.log(20)
    assert is_found.any(axis=1).all()
    found = np.percentile(10 * (is_found.argmax(axis=1) + 1), [50, 90])
    # 1,500 runs: the standard errors of both are about 3 %
    assert found == pytest.approx([half, nine_in_ten], rel=0.1)
