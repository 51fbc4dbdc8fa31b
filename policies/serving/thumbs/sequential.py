"""Comparing two rates of thumbs up at any time: after every thumb, every day, or once.

A test for a fixed number of thumbs is wrong more and more often if people look at it every day and
stop when it says what they hope for. The mixture sequential probability ratio test may be looked at
as often as one likes: under equal rates it ever exceeds 1/α with a probability of at most α, and
the interval contains the true difference at all times at once with a probability of 1 − α.

Letters: u thumbs up and d thumbs down of one policy, u' and d' of the other; p = u / (u + d) and p'
their rates; δ the difference of the true rates; v the variance of p − p'; τ the standard deviation
of the mixture, the size of differences that are found fastest.

It differs from [1] in that the two policies may get different numbers of thumbs (v takes the place
of V/n), and in that one thumb up and one thumb down are added to each policy [2]. The statistic is
normal only for many thumbs; without those four, intervals of a handful of thumbs would be too
narrow. A test simulates how often it errs.

[1] Johari, Koomen, Pekelis and Walsh, Always valid inference: continuous monitoring of A/B tests,
    2022.
[2] Agresti and Caffo, Simple and effective confidence intervals for proportions and differences of
    proportions, 2000.
[3] Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Time-uniform central limit theory and
    asymptotic confidence sequences, 2024.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

MIXTURE_SD = 0.1  # τ: differences of about ten points
ThumbCounts = Int[ndarray, "..."]
Numbers = Float[ndarray, "..."]


@dataclass(frozen=True)
class Thumbs:
    """Thumbs up and down that one policy has received.

    Worked example: `Thumbs(3, 1)` has the rate 0.75.
    """

    up: int
    down: int

    @property
    def rate(self) -> float | None:
        """The share of thumbs up; None without thumbs."""
        total = self.up + self.down
        return self.up / total if total else None


def log_evidence(
    up: ThumbCounts,
    down: ThumbCounts,
    other_up: ThumbCounts,
    other_down: ThumbCounts,
    sd: float = MIXTURE_SD,
) -> Numbers:
    """The logarithm of the evidence that two rates differ, at one or at several times.

    log Λ = ½ log v / (v + τ²) + τ² (p − p')² / (2 v (v + τ²))

    the likelihood ratio of p − p' between δ ~ N(0, τ²) and δ = 0. min(1, 1/Λ) is a p-value at any
    time [1].

    Args:
        up: thumbs up.
        down: thumbs down.
        other_up: thumbs up of the other policy.
        other_down: its thumbs down.
        sd: τ.
    """
    difference, variance = difference_and_variance(up, down, other_up, other_down)
    wider = variance + sd**2
    shrinkage: Numbers = np.log(variance / wider) / 2
    return shrinkage + sd**2 * difference**2 / (2 * variance * wider)


def difference_interval(
    ours: Thumbs, theirs: Thumbs, level: float = 0.95, sd: float = MIXTURE_SD
) -> tuple[float, float]:
    """An interval that contains δ at all times at once with a probability of `level`.

    p − p' ± √(2 v (v + τ²) / τ² · (log 1/(1 − level) + ½ log (v + τ²) / v))

    These are the δ that the test of `log_evidence` for p − p' = δ does not reject, cut at −1 and 1.
    """
    counts = map(np.asarray, (ours.up, ours.down, theirs.up, theirs.down))
    difference, variance = map(float, difference_and_variance(*counts))
    wider = variance + sd**2
    bound = float(np.log(1 / (1 - level)) + np.log(wider / variance) / 2)
    half = float(np.sqrt(2 * variance * wider / sd**2 * bound))
    return max(-1.0, difference - half), min(1.0, difference + half)


def difference_and_variance(
    up: ThumbCounts, down: ThumbCounts, other_up: ThumbCounts, other_down: ThumbCounts
) -> tuple[Numbers, Numbers]:
    """The difference p − p' and its variance v, with one thumb more of each kind.

    v = p (1 − p) / n + p' (1 − p') / n'; n = u + d + 2 and p = (u + 1) / n [2].
    """
    n, m = up + down + 2, other_up + other_down + 2
    p, q = (up + 1) / n, (other_up + 1) / m
    return p - q, p * (1 - p) / n + q * (1 - q) / m
