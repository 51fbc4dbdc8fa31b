"""What people have done lately: one's own to look at and to change, and how much of all."""

import json
from dataclasses import dataclass
from typing import Any

from labeling_app.db.connection import Connections

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
    query = """
        SELECT * FROM (
            SELECT task_id, created_at, tiers, shown, '' AS reason FROM rankings
            WHERE annotator = :me AND live = 1 AND task_id IS NOT NULL
            UNION ALL
            SELECT s.task_id, s.created_at, NULL, NULL, s.reason FROM skips s
            JOIN assignments a ON a.task_id = s.task_id AND a.annotator = s.annotator
            WHERE s.annotator = :me AND a.state = 'skipped')
        JOIN tasks t ON t.id = task_id JOIN prompts p ON p.id = t.prompt_id
        ORDER BY 2 DESC LIMIT :limit"""
    rows = connections.db.query(query, {"me": annotator, "limit": limit})
    return [_past(row) for row in rows]


def num_made_since(connections: Connections, began: float) -> int:
    """How many rankings people have made in the app since then; only those have an order shown."""
    query = """SELECT COUNT(*) FROM rankings
               WHERE live = 1 AND shown IS NOT NULL AND created_at >= ?"""
    return int(connections.db.execute(query, [began]).fetchone()[0])


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
