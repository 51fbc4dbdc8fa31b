"""The evidence of thumbs, computed in another way."""

import math

import numpy as np


def independent_evidence(u: int, d: int, v: int, e: int, difference: float = 0.0) -> float:
    """∫ N(x; δ, var) N(δ; difference, τ²) dδ / N(x; difference, var), by a sum over a fine grid."""
    p, q = (u + 1) / (u + d + 2), (v + 1) / (v + e + 2)
    variance = p * (1 - p) / (u + d + 2) + q * (1 - q) / (v + e + 2)
    grid = np.linspace(-1.5, 1.5, 600_001)
    shift = 0.1

    def density(x, mean, var):
        return np.exp(-((x - mean) ** 2) / (2 * var)) / np.sqrt(2 * math.pi * var)

    weighted = density(p - q, grid, variance) * density(grid, difference, shift**2)
    return float(weighted.sum() * (grid[1] - grid[0]) / density(p - q, difference, variance))
