"""The power law through a learning curve, its forecast, and what the intervals cover."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import norm

from reward.report.learning_curve import Point, fit_power_law, measure_curve

LABELS = np.array([200.0, 400.0, 800.0, 1600.0])


def law(labels, a=0.85, b=1.2, c=0.35):
    return a - b * np.asarray(labels, dtype=float) ** -c


def points(accuracy, prompts, seed, shared=0.6):
    """Trainings of that accuracy, which find the same prompts hard."""
    random = np.random.default_rng(seed)
    hard = random.normal(size=prompts)
    found = []
    for labels, value in zip(LABELS, accuracy, strict=True):
        luck = random.normal(size=prompts)
        right = np.sqrt(shared) * hard + np.sqrt(1 - shared) * luck < norm.ppf(value)
        counts = {str(n): (float(one), 1) for n, one in enumerate(right)}
        found.append(Point(int(labels), int(labels), {"value": right.mean()}, counts))
    return found


def test_a_known_law_is_recovered():
    fit = fit_power_law(LABELS, law(LABELS)[None], np.ones(4))
    assert fit.c == pytest.approx([0.35])
    assert fit.a == pytest.approx([0.85])
    assert fit.b * 1600**fit.c == pytest.approx([1.2])
    assert fit.at(2) == pytest.approx([law(3200)])


def test_the_fit_is_the_least_squares_within_its_bounds():
    accuracy, weights = np.array([0.61, 0.66, 0.67, 0.72]), np.array([4.0, 3.0, 2.0, 1.0])
    x = LABELS / 1600

    def loss(given):
        a, b = given
        return weights @ (accuracy - a + b * x ** -fit.c[0]) ** 2

    fit = fit_power_law(LABELS, accuracy[None], weights)
    free = minimize(loss, [0.7, 0.1], bounds=[(0, 1), (0, 1)], tol=1e-12)
    assert [fit.a[0], fit.b[0]] == pytest.approx(free.x, abs=1e-4)


def test_more_labels_never_make_it_worse_and_never_better_than_right():
    falling, steep = [0.7, 0.69, 0.68, 0.67], [0.1, 0.4, 0.7, 1.0]
    fit = fit_power_law(LABELS, np.array([falling, steep]), np.ones(4))
    assert fit.a == pytest.approx([0.685, 1.0])  # the mean; the bound
    assert fit.b[0] == 0
    assert fit.at(2)[1] < 1


def test_forecasts_cover_what_more_labels_give():
    curves = [measure_curve(points(law(LABELS), 300, seed)) for seed in range(12)]
    for name, labels in (("forecast", 3200), ("forecast_4x", 6400)):
        found = [curve[name] for curve in curves]
        assert sum(one["low"] <= law(labels) <= one["high"] for one in found) >= 11
        assert all(one["high"] - one["low"] < 0.2 for one in found)
        assert {one["labels"] for one in found} == {labels}


def test_a_gain_is_told_from_none_where_there_is_one():
    steep = measure_curve(points([0.55, 0.65, 0.74, 0.82], 400, 0))
    assert steep["gain"]["low"] > 0.01
    flat = measure_curve(points([0.7] * 4, 400, 0))
    assert flat["gain"]["low"] == 0
