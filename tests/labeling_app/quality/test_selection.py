"""Which task teaches most: every number worked by hand."""

from math import log, sqrt

import numpy as np
import pytest

from labeling_app.quality.selection import (
    choose_one_by_one,
    gain,
    information,
    largest_plausible_gap,
    learn,
    mix,
    pair_entropy,
)


def test_entropy_of_pairs():
    assert pair_entropy(np.array([2.0, 2.0])) == pytest.approx(log(2))
    # A gap of ln 3 is p = 3/4: -(3/4) ln(3/4) - (1/4) ln(1/4).
    three_quarters = 0.75 * log(4 / 3) + 0.25 * log(4)
    assert pair_entropy(np.array([log(3), 0.0])) == pytest.approx(three_quarters)
    # Three responses, three pairs: one even, two at 3/4.
    three = pair_entropy(np.array([0.0, log(3), log(3)]))
    assert three == pytest.approx((log(2) + 2 * three_quarters) / 3)
    assert pair_entropy(np.array([0.0, 5000.0])) == 0.0


def test_information_is_the_fisher_matrix():
    # p(1-p) = 3/16 and φ_1 - φ_2 = (1, -2).
    rows = information(np.array([0.0, log(3)]), np.array([[1.0, 0.0], [0.0, 2.0]]))
    np.testing.assert_allclose(rows.T @ rows, 3 / 16 * np.array([[1, -2], [-2, 4]]))


def test_gain_and_learning():
    one = np.eye(2)
    assert gain(np.array([[1.0, 0.0]]), one) == pytest.approx(log(2))
    assert gain(np.array([[1.0, 0.0], [0.0, 3.0]]), one) == pytest.approx(log(2) + log(10))
    # (I + diag(1, 0))⁻¹, after which the same pair adds log(1 + 1/2).
    after = learn(np.array([[1.0, 0.0]]), one)
    np.testing.assert_allclose(after, np.diag([0.5, 1.0]))
    assert gain(np.array([[1.0, 0.0]]), after) == pytest.approx(log(1.5))


def test_of_two_tasks_that_teach_the_same_the_second_waits():
    tasks = [np.array([[1.9, 0.0]]), np.array([[0.0, 1.0]]), np.array([[2.0, 0.0]])]
    # log 5, then log 2, then log(1 + 3.61 / 5); by their first gains task 0 would be second.
    chosen = choose_one_by_one(tasks, np.eye(2))
    assert [task for task, _ in chosen] == [2, 1, 0]
    expected = [log(5), log(2), log(1 + 3.61 / 5)]
    assert [found for _, found in chosen] == pytest.approx(expected)
    assert [task for task, _ in choose_one_by_one(tasks, np.eye(2), most=1)] == [2, 0, 1]


def test_the_largest_plausible_gap():
    rewards, features = np.array([1.0, 3.0, 2.5]), np.array([[1.0], [0.0], [2.0]])
    # Σ = 4: |1-3| + 2, |1-2.5| + 2, |3-2.5| + 4; with β = 0 the largest gap.
    assert largest_plausible_gap(rewards, features, np.array([[4.0]])) == pytest.approx(4.5)
    assert largest_plausible_gap(rewards, features, np.array([[4.0]]), 0.0) == pytest.approx(2.0)
    low = np.array([[0.25]])  # 2.5, 2.0, 1.5
    assert largest_plausible_gap(rewards, features, low) == pytest.approx(2 + sqrt(0.25))


@pytest.mark.parametrize("share", [0.2, 0.37, 1.0])
def test_every_beginning_holds_its_random_share(share):
    order = list(range(100, 153))
    mixed = mix(order, share, np.random.default_rng(0))
    assert sorted(task for task, _ in mixed) == order
    for length in range(1, len(mixed) + 1):
        assert sum(drawn for _, drawn in mixed[:length]) >= share * length
    assert sum(drawn for _, drawn in mixed) <= share * len(mixed) + 1
    rest = [task for task, drawn in mixed if not drawn]
    assert rest == sorted(rest)
    assert [task for task, drawn in mixed if drawn] != order[: len(mixed) - len(rest)]
