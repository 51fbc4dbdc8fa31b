"""The win rate that two models would have if their responses were of equal length.

As AlpacaEval 2 does (Dubois et al., 2024, arXiv 2404.04475), a logistic regression explains who
wins by the difference of lengths, and its prediction at no difference is the answer. It differs
from theirs in that it has no term for the difficulty of each prompt: two models compared once on a
few hundred prompts do not determine one.
"""

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from policies.evaluate.measures.statistics import Interval
from rlhf.run.intervals import MIN_PROMPTS

RIDGE = np.array([1e-3, 1e-2])  # keeps a model that always wins at a finite value
MAX_STEPS = 50
TOLERANCE = 1e-10


def length_controlled_rate(
    wins: Float[ndarray, " P"],
    length_differences: Float[ndarray, " P"],
    *,
    seed: int,
    samples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """The win rate at equal length, with its percentile bootstrap interval over prompts.

    σ(a), where (a, b) maximize Σ w·log p + (1 − w)·log(1 − p) − ½·(a²/1000 + b²/100)
    and p = σ(a + b·tanh(d / s)), d the difference of lengths and s its root mean square.

    Args:
        wins: each prompt's fraction of comparisons won.
        length_differences: our mean length less theirs, for each prompt.
        seed: of the resampling.
        samples: how often to resample.
        level: the fraction of such intervals that contain the true rate.
    """
    scale = float(np.sqrt(np.mean(length_differences**2))) or 1.0
    longer = np.tanh(length_differences / scale)
    value = float(_rates(wins, longer, np.ones((1, wins.size)))[0])
    if wins.size < MIN_PROMPTS:
        nan = float("nan")
        return Interval(value=value, low=nan, high=nan, n=wins.size, level=level)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(wins.size, np.full(wins.size, 1 / wins.size), size=samples)
    resampled = _rates(wins, longer, counts.astype(float))
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value=value, low=float(low), high=float(high), n=wins.size, level=level)


def _rates(
    wins: Float[ndarray, " P"], longer: Float[ndarray, " P"], weights: Float[ndarray, "R P"]
) -> Float[ndarray, " R"]:
    """σ(a) of each weighted fit, by Newton's method."""
    features = np.stack([np.ones_like(longer), longer])  # 2 P
    fit = np.zeros((len(weights), 2))
    for _ in range(MAX_STEPS):
        chances = _sigmoid(fit @ features)  # R P
        gradient = (weights * (wins - chances)) @ features.T - RIDGE * fit  # R 2
        curvature = np.einsum(
            "rp,ip,jp->rij", weights * chances * (1 - chances), features, features, optimize=True
        ) + np.diag(RIDGE)
        step = np.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
        fit += np.clip(step, -2, 2)  # far from the optimum a whole Newton step may overshoot
        if np.abs(step).max() < TOLERANCE:
            break
    rates: Float[ndarray, " R"] = _sigmoid(fit[:, 0])
    return rates


def _sigmoid(x: Float[ndarray, "..."]) -> Float[ndarray, "..."]:
    result: Float[ndarray, ...] = 0.5 * (1 + np.tanh(x / 2))
    return result
