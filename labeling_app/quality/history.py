"""An annotator's latest work, to look at and to change."""

import json
from dataclasses import dataclass

from labeling_app.db.connection import Connections
from labeling_app.db.reports import recent_rows
from labeling_app.rankings.flags import read_flags
from rlhf.records.thumbs import ALL_BAD

LIMIT = 50
PROMPT_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True)
class Past:
    """One submission or skip; `answer` is that of `in_words`, in the letters on the screen."""

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
            else in_words(json.loads(row["shown"]), row["tiers"], row["flags"]),
        )
        for row in recent_rows(connections, annotator, limit)
    ]


def in_letters(shown_order: list[str], tiers: str) -> str:
    """Stored tiers in the letters of an order shown."""
    names = letters(shown_order)
    return " > ".join(" = ".join(names[i] for i in tier) for tier in json.loads(tiers))


def in_words(shown_order: list[str], tiers: str, flags: str) -> str:
    """A stored ranking as people read it: "B > A = C", "all bad", or "B > A, all bad"."""
    order = in_letters(shown_order, tiers)
    if ALL_BAD not in read_flags(flags):
        return order
    return f"{order}, all bad" if ">" in order else "all bad"


def letters(shown_order: list[str]) -> dict[str, str]:
    """The letter of every response on a screen: the first is A."""
    return {response_id: chr(65 + index) for index, response_id in enumerate(shown_order)}
