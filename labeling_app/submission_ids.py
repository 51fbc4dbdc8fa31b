"""The ids that browsers and programs give to what they send, by which a repetition is known.

A repetition changes nothing. Another judgement under a used id is refused: taking it for a
repetition would drop it.
"""

import json
from dataclasses import replace

from sqlite_utils import Database

from rlhf.errors import InputError
from rlhf.records import Ranking, content_id


def with_own_id(db: Database, ranking: Ranking) -> Ranking:
    """A ranking from a page under an id that nobody else's ranking has.

    One that is taken is not refused: ids of imports and of judges follow from what they rank, and
    a refusal would confirm to annotators which model they guessed.
    """
    query = "SELECT annotator, shown FROM rankings WHERE id = ?"
    row = db.execute(query, [ranking.id]).fetchone()
    if row is None or (row[0] == ranking.annotator and row[1] is not None):
        return ranking
    own = content_id("own id", ranking.annotator, ranking.id)
    return with_own_id(db, replace(ranking, id=own))


def is_stored(
    db: Database, ranking: Ranking, *, task_id: int | None = None, strengths: tuple[int, ...] = ()
) -> bool:
    """Whether this very ranking is stored under its id.

    Args:
        db: the database.
        ranking: as it would be stored.
        task_id: of the board's task that it ranks.
        strengths: as they would be stored; a `Ranking` cannot leave some of them open.

    Raises:
        InputError: another ranking is.
    """
    query = """SELECT annotator, prompt_id, task_id, tiers, strengths, flags, note
               FROM rankings WHERE id = ?"""
    row = db.execute(query, [ranking.id]).fetchone()
    if row is None:
        return False
    annotator, prompt_id, of_task, *lists, note = row
    there = (annotator, prompt_id, of_task, *map(json.loads, lists), note)
    tiers = [list(tier) for tier in ranking.tiers]
    sent = (tiers, list(strengths), list(ranking.flags), ranking.note)
    if there != (ranking.annotator, ranking.prompt_id, task_id, *sent):
        raise used_id()
    return True


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
    """What to say about an id that something else was sent under."""
    return InputError(
        "This id was used before, for something else",
        "Reload the page, or send it under another id.",
    )
