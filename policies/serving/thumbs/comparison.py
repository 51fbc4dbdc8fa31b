"""The comparison of two policies by their thumbs, for programs and in words."""

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np

from policies.serving.thumbs.sequential import Thumbs, difference_interval, log_evidence

LEVEL = 0.95


def compare_thumbs(counts: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The rates of both policies, their difference with an interval, and a p-value.

    All of it may be looked at at any time, and as often as one likes.

    Args:
        counts: thumbs up and down of `policy` and `against`.
    """
    ours, theirs = Thumbs(*counts["policy"]), Thumbs(*counts["against"])
    up, down, other_up, other_down = map(np.asarray, (*astuple(ours), *astuple(theirs)))
    evidence = log_evidence(up, down, other_up, other_down)
    low, high = difference_interval(ours, theirs, LEVEL)
    value = None if ours.rate is None or theirs.rate is None else ours.rate - theirs.rate
    return {
        "policy": {"up": ours.up, "down": ours.down, "rate": ours.rate},
        "against": {"up": theirs.up, "down": theirs.down, "rate": theirs.rate},
        "difference": {"value": value, "low": low, "high": high, "level": LEVEL},
        "p_value": min(1.0, math.exp(-float(evidence))),
        "better": "policy" if low > 0 else "against" if high < 0 else None,
    }
