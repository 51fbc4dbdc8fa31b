"""The minimum sample for an interval, and a rate with its interval in words."""

from collections.abc import Mapping
from typing import Any

MIN_PROMPTS = 5  # resampling fewer gives intervals that are far too narrow
TOO_FEW = "too few prompts for an interval"


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
