"""Drafts: an annotator's unfinished work on a task, in the form that the board sends and reads."""

import json
import time
from typing import Any

from sqlite_utils import Database

from labeling_app.rankings.flags import OF_RANKINGS, read_flags, split_flags
from rlhf.errors import InputError

MAX_DRAFT_CHARACTERS = 200_000


def read_draft(db: Database, task_id: int, annotator: str) -> dict[str, Any] | None:
    """The draft of one person's task, None where there is none."""
    query = "SELECT state FROM drafts WHERE task_id = ? AND annotator = ?"
    row = db.execute(query, [task_id, annotator]).fetchone()
    return json.loads(row[0]) if row else None


def write_draft(db: Database, task_id: int, annotator: str, state: dict[str, Any]) -> None:
    """Keep a draft in place of the one before.

    Raises:
        InputError: it is too large.
    """
    text = json.dumps(state, ensure_ascii=False)
    if len(text) > MAX_DRAFT_CHARACTERS:
        raise InputError(f"The draft has {len(text)} characters", "Shorten the note.")
    db.execute(
        "INSERT OR REPLACE INTO drafts VALUES (?, ?, ?, ?)", [task_id, annotator, text, time.time()]
    )


def drop_draft(db: Database, task_id: int, annotator: str) -> None:
    """Forget the draft of work that is finished."""
    db.execute("DELETE FROM drafts WHERE task_id = ? AND annotator = ?", [task_id, annotator])


def ranking_as_draft(row: dict[str, Any], shown_order: list[str]) -> dict[str, Any]:
    """A stored ranking as a draft: positions in the order shown.

    Args:
        row: `tiers`, `strengths`, `flags` and `note` as the database has them.
        shown_order: ids of the responses in the order shown.
    """
    of_all, of_one = split_flags(read_flags(row["flags"]), shown_order)
    return {
        "tiers": [[shown_order.index(i) for i in tier] for tier in json.loads(row["tiers"])],
        "strengths": json.loads(row["strengths"]),
        "flags": [name for name in of_all if name in OF_RANKINGS],
        "response_flags": [[position, name] for position, name in of_one],
        "note": row["note"],
    }
