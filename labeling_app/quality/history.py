"""What an annotator has done lately, to look at and to change."""

import json
from dataclasses import dataclass

from labeling_app.db.connection import Connections
from labeling_app.db.reports import recent_rows

LIMIT = 50
PROMPT_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True)
class Past:
    """One submission or skip; `answer` is "B > A = C" in the letters that were on the screen."""

    task_id: int
    at: float
    prompt: str
    answer: str


def recent_work(connections: Connections, annotator: str, limit: int = LIMIT) -> list[Past]:
    """The latest submissions and skips of an annotator, newest first."""
    return [
        Past(
            task_id=row["task_id"],
            at=row["created_at"],
            prompt=json.loads(row["messages"])[-1]["content"][:PROMPT_CHARACTERS],
            answer=f"skipped: {row['reason']}"
            if row["tiers"] is None
            else in_letters(json.loads(row["shown"]), row["tiers"]),
        )
        for row in recent_rows(connections, annotator, limit)
    ]


def in_letters(shown_order: list[str], tiers: str) -> str:
    """Stored tiers in the letters of an order shown."""
    names = letters(shown_order)
    return " > ".join(" = ".join(names[i] for i in tier) for tier in json.loads(tiers))


def letters(shown_order: list[str]) -> dict[str, str]:
    """The letter of every response on a screen: the first is A."""
    return {response_id: chr(65 + place) for place, response_id in enumerate(shown_order)}
