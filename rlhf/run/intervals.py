"""The minimum sample for an interval, what a rate proves, and a rate with its interval in words."""

from collections.abc import Mapping
from typing import Any, Literal

MIN_PROMPTS = 5  # resampling fewer gives intervals that are far too narrow
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
