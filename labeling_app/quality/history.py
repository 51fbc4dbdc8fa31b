"""What an annotator has done lately, to look at and to change."""

import json
from dataclasses import dataclass
from typing import Any

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
    return [_past(row) for row in recent_rows(connections, annotator, limit)]


def _past(row: dict[str, Any]) -> Past:
    prompt = json.loads(row["messages"])[-1]["content"]
    return Past(
        task_id=row["task_id"],
        at=row["created_at"],
        prompt=prompt[:PROMPT_CHARACTERS],
        answer=_answer(row),
    )


def _answer(row: dict[str, Any]) -> str:
    if row["tiers"] is None:
        return f"skipped: {row['reason']}"
    return in_letters(json.loads(row["shown"]), row["tiers"])


def in_letters(shown: list[str], tiers: str) -> str:
    """Stored tiers in the letters of an order shown."""
    names = letters(shown)
    return " > ".join(" = ".join(names[i] for i in tier) for tier in json.loads(tiers))


def letters(shown: list[str]) -> dict[str, str]:
    """The letter of every response on a screen: the first is A."""
    return {response_id: chr(65 + place) for place, response_id in enumerate(shown)}
