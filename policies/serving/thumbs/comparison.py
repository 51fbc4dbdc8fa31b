"""What the thumbs say about two policies, for programs and in words."""

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


def in_words(found: Mapping[str, Any]) -> str:
    """A comparison in a few lines.

    Args:
        found: of `compare_thumbs`, with the `name` of both policies.
    """
    lines = [_line(found[side]) for side in ("policy", "against")]
    difference = found["difference"]
    if difference["value"] is None:
        return "\n".join([*lines, "No comparison yet: one of them has no thumbs."])
    low, high = 100 * difference["low"], 100 * difference["high"]
    lines.append(
        f"Difference {100 * difference['value']:+.0f} points (95 % interval {low:+.0f} to "
        f"{high:+.0f}, which holds whenever you look)."
    )
    better = found["better"]
    lines.append(
        f"People like {found[better]['name']} better."
        if better
        else "Which one people like better is not known yet."
    )
    return "\n".join(lines)


def _line(side: Mapping[str, Any]) -> str:
    total = side["up"] + side["down"]
    rate = "" if side["rate"] is None else f", {100 * side['rate']:.0f} % up"
    return f"{side['name']}: {total:,} thumb{'' if total == 1 else 's'}{rate}"
