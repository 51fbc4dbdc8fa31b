"""The worth of more labels: accuracy against their number, a power law, and a forecast.

accuracy(n) = a − b·n^−c, as Hestness et al. (arXiv 1712.00409, eq. 1) fit errors; n counts labels.
Differs from the paper: least squares with binomial weights for every c of a grid, where a and b
have a closed form, within a ≤ 1 and b ≥ 0. Three to five measurements determine no more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from rlhf.run.intervals import in_words

EXPONENTS = np.arange(1, 21) / 20  # measured ones are from 0.07 to 0.35, from theory 0.5 and 1
RESAMPLES = 2000
QUANTILES = (0.025, 0.975)
SMALLEST_GAIN = 0.005  # half a point rounds to nothing


class PowerLaw(NamedTuple):
    """accuracy(n) = a − b·(n / N)^−c, of R fits; N is the largest number of labels measured."""

    a: Float[ndarray, " R"]
    b: Float[ndarray, " R"]
    c: Float[ndarray, " R"]

    def at(self, ratio: float) -> Float[ndarray, " R"]:
        """The accuracy at `ratio` times the labels of the largest measurement."""
        return self.a - self.b * ratio**-self.c


@dataclass(frozen=True)
class Point:
    """A training: what it learned from, and for each held-out prompt (pairs right, pairs)."""

    prompts: int
    labels: int
    accuracy: Mapping[str, Any]
    counts: Mapping[str, tuple[float, int]]

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> "Point":
        """The point of a report.json."""
        trained = report["trained_on"]
        return cls(
            trained["prompts"], trained["labels"], report["accuracy"], report["held_out_counts"]
        )


def fit_power_law(
    labels: Float[ndarray, " S"], accuracy: Float[ndarray, "R S"], weights: Float[ndarray, " S"]
) -> PowerLaw:
    """The power law of the smallest Σ_s weights_s · (accuracy_s − a + b·(n_s / N)^−c)², R times.

    Args:
        labels: of S trainings.
        accuracy: of each, measured R times over.
        weights: of each, 1 / variance.
    """
    w = weights / weights.sum()
    mean_y = accuracy @ w
    best = np.full(len(accuracy), np.inf)
    parameters = np.zeros((3, len(accuracy)))
    for c in EXPONENTS:
        x = (labels / labels.max()) ** -c
        mean_x = x @ w
        slope = (accuracy - mean_y[:, None]) @ (w * (x - mean_x)) / ((x - mean_x) ** 2 @ w)
        b = np.maximum(-slope, 0)
        a = mean_y + b * mean_x
        b = np.where(a > 1, (1 - accuracy) @ (w * x) / (x**2 @ w), b)  # the best for a = 1
        a = np.minimum(a, 1)
        loss = (accuracy - a[:, None] + b[:, None] * x) ** 2 @ w
        better = loss < best
        best = np.where(better, loss, best)
        parameters = np.where(better, np.stack([a, b, np.full(len(a), c)]), parameters)
    return PowerLaw(*parameters)


def measure_curve(points: Sequence[Point]) -> dict[str, Any]:
    """The curve through some trainings and what twice and four times the labels would give.

    Intervals are of 95 %, from resampling the held-out prompts, the same for all trainings; they
    do not cover what another `--seed` would change. `gain` is the forecast for twice the labels
    less the curve's value at the labels there are; it is never below 0.

    Args:
        points: trainings on nested parts, measured on the same prompts, the largest last.
    """
    names = list(points[-1].counts)
    table = np.array([[point.counts[name] for name in names] for point in points], dtype=float)
    right, pairs = table[:, :, 0], table[:, :, 1]  # (S, P)
    labels = np.array([point.labels for point in points], dtype=float)
    smoothed = (right.sum(axis=1) + 1) / (pairs.sum(axis=1) + 2)
    weights = pairs.sum(axis=1) / (smoothed * (1 - smoothed))
    fit = fit_power_law(labels, (right.sum(axis=1) / pairs.sum(axis=1))[None], weights)
    drawn = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES
    )
    fits = fit_power_law(labels, (drawn @ right.T) / (drawn @ pairs.T), weights)
    a, b, c = (float(value[0]) for value in fit)
    return {
        "points": [
            {"labels": point.labels, "train_prompts": point.prompts, **point.accuracy}
            for point in points
        ],
        "fit": {"a": a, "b": b * float(labels.max()) ** c, "c": c},
        "forecast": {"labels": 2 * points[-1].labels, **_interval(fit.at(2), fits.at(2))},
        "forecast_4x": {"labels": 4 * points[-1].labels, **_interval(fit.at(4), fits.at(4))},
        "gain": _interval(fit.at(2) - fit.at(1), fits.at(2) - fits.at(1)),
    }


def _interval(value: Float[ndarray, "1"], values: Float[ndarray, " R"]) -> dict[str, float]:
    low, high = np.quantile(values, QUANTILES)
    return {"value": float(value[0]), "low": float(low), "high": float(high)}


def forecasts_of(curve: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The forecasts of a curve in a report; earlier reports have none for four times the labels."""
    return [curve[name] for name in ("forecast", "forecast_4x") if name in curve]


def describe_curve(curve: Mapping[str, Any]) -> str:
    """The forecasts in a sentence, and whether the first may be no gain at all."""
    last = curve["points"][-1]
    would = [
        f"{forecast['labels']:,} would give {in_words(forecast)}"
        for forecast in forecasts_of(curve)
    ]
    sentence = f"{last['labels']:,} labels give {100 * last['value']:.0f} %; {' and '.join(would)}."
    is_gain = curve["gain"]["low"] >= SMALLEST_GAIN
    if is_gain:
        return sentence
    return f"{sentence} The gain of twice the labels cannot be told from none."
