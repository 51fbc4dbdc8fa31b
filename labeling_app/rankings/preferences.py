"""Which properties of responses win: a Bradley-Terry model of judged pairs.

x_i is the difference of the properties of pair i, winner minus loser, F numbers. The winner of such
a pair wins with probability p_i = σ(x_iᵀβ) (Bradley and Terry, Biometrika 39, 1952, with strengths
that are linear in the properties). There is no intercept: which response of a pair comes first
means nothing.

β is the most likely one. Pairs of one prompt resemble each other, so the covariance is the sandwich
that takes prompts, not pairs, as independent (Liang and Zeger, Biometrika 73, 1986):

    V = G / (G − 1) · H⁻¹ (Σ_g s_g s_gᵀ) H⁻¹
    H = Σ_i p_i (1 − p_i) x_i x_iᵀ    s_g = Σ_{i of prompt g} (1 − p_i) x_i

Letters: P pairs, F properties, G prompts.
"""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.special import expit

MOST_STEPS = 50
TOLERANCE = 1e-9  # of β, between two steps
LARGEST = 15.0  # beyond, one side always wins, and β grows without end
WORST_CONDITION = 1e8  # of H; beyond, two properties cannot be told apart


def fit_preferences(
    differences: Float[ndarray, "P F"], prompts: Int[ndarray, " P"]
) -> tuple[Float[ndarray, " F"], Float[ndarray, "F F"]] | None:
    """β and its covariance V, by Newton's method; None where the pairs do not determine them.

    Args:
        differences: x, winner minus loser.
        prompts: the prompt of each pair, any numbers; at least two prompts.
    """
    weights = np.zeros(differences.shape[1])
    for _ in range(MOST_STEPS):
        chance = expit(differences @ weights)
        hessian = (differences.T * (chance * (1 - chance))) @ differences
        if not np.linalg.cond(hessian) < WORST_CONDITION:
            return None
        step = np.linalg.solve(hessian, differences.T @ (1 - chance))
        weights = weights + step
        if not np.abs(weights).max() < LARGEST:
            return None
        if np.abs(step).max() < TOLERANCE:
            return weights, _clustered(differences, prompts, weights)
    return None


def _clustered(
    differences: Float[ndarray, "P F"], prompts: Int[ndarray, " P"], weights: Float[ndarray, " F"]
) -> Float[ndarray, "F F"]:
    chance = expit(differences @ weights)
    hessian = (differences.T * (chance * (1 - chance))) @ differences
    _, prompt = np.unique(prompts, return_inverse=True)
    number = int(prompt.max()) + 1
    scores = np.zeros((number, len(weights)))
    np.add.at(scores, prompt, differences * (1 - chance)[:, None])  # [G, F]
    inverse = np.linalg.inv(hessian)
    covariance: Float[ndarray, "F F"] = inverse @ (scores.T @ scores) @ inverse
    return covariance * number / (number - 1)
