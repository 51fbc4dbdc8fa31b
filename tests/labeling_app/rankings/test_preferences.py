"""The regression over judged pairs, against numbers worked by hand and by another method."""

from math import exp, log, sqrt

import numpy as np
import pytest

from labeling_app.rankings.preferences import fit_preferences


def test_one_property_by_hand() -> None:
    # 16 pairs of four prompts; the response with the property wins 12 of them.
    wins = [4, 4, 3, 1]
    differences = [[1.0] if n < won else [-1.0] for won in wins for n in range(4)]
    weights, covariance = fit_preferences(np.array(differences), np.repeat([7, 3, 9, 1], 4))
    assert weights == pytest.approx([log(12 / 4)])  # σ(β) = 3/4
    # A win adds 1/4 to its prompt's score, a loss -3/4: 1, 1, 0 and -2. H = 16 · 3/16 = 3.
    assert covariance == pytest.approx(np.array([[(1 + 1 + 0 + 4) / 3**2 * 4 / 3]]))


def climb(differences: np.ndarray) -> list[float]:
    """The most likely weights of two properties, by small steps up the gradient."""
    a = b = 0.0
    for _ in range(20_000):
        slope_a = slope_b = 0.0
        for x, y, count in differences:
            lost = count / (1 + exp(a * x + b * y))
            slope_a += lost * x
            slope_b += lost * y
        a, b = a + 0.01 * slope_a, b + 0.01 * slope_b
    return [a, b]


def test_two_properties_by_another_method() -> None:
    # (x, y, how many pairs): winners minus losers
    counted = [(1, 0, 9), (-1, 0, 4), (0, 1, 6), (0, -1, 5), (1, 1, 3), (-1, 1, 4), (0.5, -1, 2)]
    rows = np.array([(x, y) for x, y, count in counted for _ in range(count)], dtype=float)
    prompts = np.arange(len(rows)) % 7
    weights, covariance = fit_preferences(rows, prompts)
    assert weights == pytest.approx(climb(counted), abs=1e-6)
    hessian, middle = np.zeros((2, 2)), np.zeros((2, 2))
    for prompt in range(7):
        score = np.zeros(2)
        for row in rows[prompts == prompt]:
            chance = 1 / (1 + exp(-(weights[0] * row[0] + weights[1] * row[1])))
            hessian += chance * (1 - chance) * np.outer(row, row)
            score += (1 - chance) * row
        middle += np.outer(score, score)
    [[p, q], [_, s]] = hessian
    inverse = np.array([[s, -q], [-q, p]]) / (p * s - q * q)
    assert covariance == pytest.approx(inverse @ middle @ inverse * 7 / 6)


@pytest.mark.parametrize(
    "differences",
    [
        [[1.0], [1.0], [2.0]],  # one side always wins
        [[1.0, 0.0], [-1.0, 0.0]],  # nothing differs in the second property
        [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]],  # the two cannot be told apart
    ],
)
def test_what_the_pairs_do_not_determine_is_not_estimated(differences: list) -> None:
    assert fit_preferences(np.array(differences), np.arange(len(differences))) is None


def test_intervals_contain_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    truth, hits, runs = np.array([0.6, -0.4]), 0, 300
    for _ in range(runs):
        # Five pairs of each of 60 prompts, whose people share a taste of their own.
        tastes = np.repeat(rng.normal(0, 0.3, 60), 5)
        rows = rng.choice([-1.0, 1.0], (300, 2))
        first = rows @ truth + tastes * rows[:, 0] > rng.logistic(size=300)
        rows[~first] *= -1
        weights, covariance = fit_preferences(rows, np.repeat(np.arange(60), 5))
        hits += abs(weights[1] - truth[1]) < 1.96 * sqrt(covariance[1, 1])
    assert 0.91 < hits / runs < 0.98
