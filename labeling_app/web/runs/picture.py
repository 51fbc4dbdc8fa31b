"""The win rates of all rounds as one picture: where to draw what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 32
APART = 6  # between the two rates of a round
SERIES = ("original", "before")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A win rate in the picture; `low` and `high` are None where there is no interval."""

    series: str
    x: float
    y: float
    low: float | None
    high: float | None
    label: str


def points(results: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The win rates of the evaluated rounds: against the original, and the policy before."""
    win_rates = []
    for result in results:
        for side, series in enumerate(SERIES):
            rate = result["win_rate"][series]
            if rate is None or (series == "before" and result["round"] == 0):
                continue  # in round 0 both are the same
            low, high = rate.get("low"), rate.get("high")
            interval = ""
            if low is not None and high is not None:
                interval = f", interval {100 * low:.0f}–{100 * high:.0f} %"
            other = "the original" if series == "original" else "the policy before"
            win_rates.append(
                Point(
                    series=series,
                    x=x_of(result["round"], len(results)) + APART * (2 * side - 1),
                    y=y_of(rate["value"]),
                    low=y_of(low) if interval else None,
                    high=y_of(high) if interval else None,
                    label=f"round {result['round']} wins {100 * rate['value']:.0f} % against "
                    f"{other}{interval}",
                )
            )
    return win_rates


def x_of(number: int, count: int) -> float:
    """The horizontal position of a round."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (number + 0.5) / count


def y_of(rate: float) -> float:
    """The vertical position of a win rate."""
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - rate), 1)
