"""How far an annotator has come in a queue, so that the next task is one step from there.

A task that wants several people stays open to the others after somebody has ranked it. Without
`passed`, whoever is ahead would look through all of these for each next task: 90,000 imported
judgments took 28 ms a submit. Triggers keep it right when tasks are opened, added or moved.
"""

import json
from typing import Any

from sqlite_utils import Database

QueuePosition = tuple[float, int]
"""Priority and number of a task: higher priorities come first, then lower numbers."""

START, END = (1e300, 0), (-1e300, 0)


def first_in_queue(
    db: Database, annotator: str, source: str | None, *, but: str | None = None
) -> QueuePosition | None:
    """The first task of a source, or of those that are for everybody, that is left for somebody.

    Args:
        db: the database, inside a transaction.
        annotator: who has neither ranked nor skipped it.
        source: the source; None: the queue for everybody.
        but: a prompt whose tasks are passed over for now.
    """
    before = _passed(db, annotator, source)
    position = _first_from(db, annotator, source, before)
    if before != (position or END):
        row = [annotator, json.dumps(source), *(position or END)]
        db.execute("INSERT OR REPLACE INTO passed VALUES (?, ?, ?, ?)", row)
    if position is None or but is None:
        return position
    [prompt_id] = db.execute("SELECT prompt_id FROM tasks WHERE id = ?", [position[1]]).fetchone()
    return _first_from(db, annotator, source, position, but) if prompt_id == but else position


def _first_from(
    db: Database, annotator: str, source: str | None, position: QueuePosition, but: str = ""
) -> QueuePosition | None:
    # One after the other: SQLite cannot begin in the middle of an index whose columns differ in
    # their direction.
    values: dict[str, Any] = {"me": annotator, "source": source, "but": but}
    values |= {"priority": position[0], "id": position[1]}
    same_priority = _first(db, values, "priority = :priority AND id >= :id")
    return same_priority or _first(db, values, "priority < :priority")


def _passed(db: Database, annotator: str, source: str | None) -> QueuePosition:
    query = "SELECT priority, id FROM passed WHERE annotator = ? AND source = ?"
    row = db.execute(query, [annotator, json.dumps(source)]).fetchone()
    return (row[0], row[1]) if row else START


def _first(db: Database, values: dict[str, Any], there: str) -> QueuePosition | None:
    """The first task of a part of a queue, where `there` says which part.

    The conditions are word for word those of the indexes, or these would not be used.
    """
    is_given = "reserved IS NOT NULL AND reserved = :source"
    which = "reserved IS NULL" if values["source"] is None else is_given
    query = f"""SELECT priority, id FROM tasks t WHERE open > 0 AND only_for IS NULL
                AND purpose IN ('rank', 'compare') AND {which} AND {there}
                AND prompt_id <> :but AND NOT EXISTS (
                    SELECT 1 FROM assignments a WHERE a.task_id = t.id AND a.annotator = :me
                    AND a.state <> 'expired')
                ORDER BY priority DESC, id LIMIT 1"""
    row = db.execute(query, values).fetchone()
    return (row[0], row[1]) if row else None
