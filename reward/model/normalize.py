"""Scales rewards to mean 0 and standard deviation 1 over reference outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rlhf.errors import GuardError

SMALLEST_SPREAD = 1e-6


@dataclass(frozen=True)
class Scale:
    """reward = gain · head output + bias, and which responses it was fitted on."""

    gain: float
    bias: float
    fitted_on: str
    responses: int


def fit_scale(rewards: Sequence[float], fitted_on: str) -> Scale:
    """Gain and bias that give these rewards mean 0 and standard deviation 1.

    Raises:
        GuardError: the rewards are all equal, so the model has learned nothing.
    """
    mean, spread = float(np.mean(rewards)), float(np.std(rewards))
    if not spread > SMALLEST_SPREAD:
        raise GuardError(
            f"The reward model gives {len(rewards)} responses ({fitted_on}) the same reward, "
            f"{mean:.4g}",
            "Check the rankings, or train with a smaller --optim.learning-rate.",
        )
    return Scale(1 / spread, -mean / spread, fitted_on, len(rewards))


def fold_into_head(state: dict[str, Any], head: str, gain: float) -> dict[str, Any]:
    """A copy of a classifier's state with the gain multiplied into its head of this name."""
    folded = dict(state)
    for name in (f"{head}.weight", f"{head}.bias"):
        if name in folded:
            tensor: Tensor = folded[name]
            folded[name] = tensor * gain
    return folded
