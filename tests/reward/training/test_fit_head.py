"""The fitted head against an independent solution."""

import numpy as np
import torch
from scipy.optimize import minimize

from reward.data.groups import Group, Pair
from reward.losses import Objective
from reward.training.fit_head import fit_weight


def build_groups() -> list[Group]:
    """Two prompts of three responses: a clear order, and an order with a tie."""
    first = (Pair(0, 1, 1.0, 0, "a"), Pair(0, 2, 1.0, 0, "a"), Pair(1, 2, 1.0, 0, "a"))
    second = (Pair(2, 0, 1.0, 0, "a"), Pair(0, 1, 0.5, 0, "a"))
    responses = ((1,), (2,), (3,))
    return [
        Group("p", (7,), responses, pairs=first),
        Group("q", (8,), responses, pairs=second),
    ]


def test_the_fitted_head_minimizes_the_penalised_loss() -> None:
    features = np.random.default_rng(0).normal(size=(6, 4))
    penalty = 0.05

    def soft(x: float) -> float:
        return float(np.logaddexp(0.0, -x))

    def loss(weight: np.ndarray) -> float:
        r = features @ weight
        p = np.mean([soft(r[0] - r[1]), soft(r[0] - r[2]), soft(r[1] - r[2])])
        tie = 0.5 * soft(r[3] - r[4]) + 0.5 * soft(r[4] - r[3])
        q = np.mean([soft(r[5] - r[3]), tie])
        return float((p + q) / 2 + penalty * weight @ weight)

    expected = minimize(loss, np.zeros(4), tol=1e-12).x
    weight = fit_weight(torch.tensor(features), build_groups(), Objective(), penalty)
    np.testing.assert_allclose(weight.numpy(), expected, atol=1e-4)
