"""Ids that browsers and programs choose for what they send, so that sending twice stores once.

Different content under a used id is refused: it would be lost if it counted as sent before.
"""

import json
from dataclasses import replace
from typing import Any

from sqlite_utils import Database

from labeling_app.db.connection import VISIBLE
from rlhf.errors import InputError
from rlhf.records.schema import Ranking, content_id


def unless_stored(
    db: Database, ranking: Ranking, *, task_id: int | None = None, strengths: tuple[int, ...] = ()
) -> Ranking | None:
    """A ranking from a page, under an id that nobody else's has; None where it is stored already.

    An id of somebody else's is not refused: ids of imports and of judges follow from what they
    rank, and a refusal would confirm to annotators which model they guessed.

    Args:
        db: the database.
        ranking: as it would be stored.
        task_id: of the board's task that it ranks.
        strengths: as they would be stored; a `Ranking` cannot leave some of them open.

    Raises:
        InputError: this annotator has sent another ranking under that id.
    """
    row = _row(db, ranking.id)
    if row is None:
        return ranking
    if row["annotator"] != ranking.annotator or row["shown"] is None:
        own = replace(ranking, id=content_id("own id", ranking.annotator, ranking.id))
        return unless_stored(db, own, task_id=task_id, strengths=strengths)
    _require_same(row, ranking, task_id, strengths)
    return None


def is_stored(db: Database, ranking: Ranking) -> bool:
    """Whether this very ranking of a program, whose ids are its own, is stored.

    A row of an unfinished import does not count: it may be rolled back.

    Raises:
        InputError: another one is, under its id.
    """
    row = _row(db, ranking.id)
    if row is None:
        return False
    _require_same(row, ranking, None, ())
    return bool(row["is_visible"])


def _row(db: Database, ranking_id: str) -> dict[str, Any] | None:
    names = ("annotator", "shown", "prompt_id", "task_id", "tiers", "strengths", "flags", "note")
    query = f"SELECT {', '.join(names)}, {VISIBLE} FROM rankings WHERE id = ?"
    row = db.execute(query, [ranking_id]).fetchone()
    return dict(zip((*names, "is_visible"), row, strict=True)) if row else None


def _require_same(
    row: dict[str, Any], ranking: Ranking, task_id: int | None, strengths: tuple[int, ...]
) -> None:
    there = [row[name] for name in ("annotator", "prompt_id", "task_id", "note")]
    there += [json.loads(row[name]) for name in ("tiers", "strengths", "flags")]
    sent: list[Any] = [ranking.annotator, ranking.prompt_id, task_id, ranking.note]
    sent += [[list(tier) for tier in ranking.tiers], list(strengths), list(ranking.flags)]
    if there != sent:
        raise used_id()


def is_stored_skip(db: Database, skip_id: str, task_id: int, annotator: str) -> bool:
    """Whether this very skip is stored under its id.

    Raises:
        InputError: another skip is.
    """
    query = "SELECT task_id, annotator FROM skips WHERE id = ?"
    row = db.execute(query, [skip_id]).fetchone()
    if row is not None and row != (task_id, annotator):
        raise used_id()
    return row is not None


def used_id() -> InputError:
    """The error for an id under which something else was sent."""
    return InputError(
        "This id was used before, for something else",
        "Reload the page, or send it under another id.",
    )
