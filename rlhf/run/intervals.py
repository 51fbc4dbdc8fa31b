"""The minimum sample for an interval, the interval of a share, what a rate proves, and in words."""

from collections.abc import Mapping
from math import sqrt
from typing import Any, Literal

NORMAL_975 = 1.959964  # 97.5 % of a normal distribution are below it
MIN_PROMPTS = 5  # resampling fewer gives intervals that are far too narrow
FEW_PROMPTS = 30  # an interval of fewer is a rough guide, and proves nothing by itself
TOO_FEW = "too few prompts for an interval"
SIGNIFICANCE = 0.05

Outcome = Literal["better", "worse", "unproven"]


def outcome(rate: Mapping[str, Any]) -> Outcome:
    """What a win rate proves.

    Better or worse only where the interval excludes one half and the sign test, if there is one,
    agrees: a handful of prompts that all went one way has an interval of no width and proves
    nothing.
    """
    low, high, p_value = rate["low"], rate["high"], rate.get("p_value", 0.0)
    if low is None or high is None or p_value is None or not p_value < SIGNIFICANCE:
        return "unproven"
    if low > 0.5:
        return "better"
    return "worse" if high < 0.5 else "unproven"


def share_of(successes: float, number: int) -> dict[str, float] | None:
    """A share with its 95 % interval (Wilson, 1927), as `value`, `low` and `high`; None of none.

    (p + z²/2n ± z √(p (1 − p) / n + z²/4n²)) / (1 + z²/n)

    Example: 8 of 10 is 0.8, from 0.49 to 0.94.
    """
    if not number:
        return None
    share, square = successes / number, NORMAL_975**2 / number
    middle = (share + square / 2) / (1 + square)
    half = sqrt(square * share * (1 - share) + square**2 / 4) / (1 + square)
    return {"value": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def in_words(rate: Mapping[str, Any]) -> str:
    """A rate with its interval in words.

    Its `low` and `high` are None without an interval; its `level` is 0.95 if absent.

    Example: `{"value": 0.82, "low": 0.75, "high": 0.88}` is
    "82 % (95 % interval 75–88 %)".
    """
    value = f"{100 * rate['value']:.0f} %"
    if rate["low"] is None:
        return f"{value} ({TOO_FEW})"
    level = 100 * rate.get("level", 0.95)
    return f"{value} ({level:.0f} % interval {100 * rate['low']:.0f}–{100 * rate['high']:.0f} %)"
