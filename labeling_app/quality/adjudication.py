"""A lead settles a task on which people differ; exports take the lead's ranking instead of theirs.

A decision is a task of its own, for one lead, that names the task it settles: it is leased, kept as
a draft, submitted and changed like any other. The latest decision on a task counts.
"""

import json
import time
from dataclasses import dataclass

from sqlite_utils import Database

from labeling_app.db.connection import Connections
from labeling_app.db.queue import Task, TaskQueue
from labeling_app.quality.history import in_letters, letters
from labeling_app.rankings.flags import read_flags, split_flags
from rlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """What one person said, nameless and in the letters of the lead's own screen."""

    answer: str
    flags: list[str]
    note: str


def open_decision(queue: TaskQueue, lead: str, task_id: int) -> None:
    """Make settling a task what this lead does next.

    Raises:
        InputError: there is no such task, or nobody has ranked it.
    """
    with queue.connections.write() as db:
        query = "SELECT id FROM tasks WHERE decides = ? AND only_for = ?"
        row = db.execute(query, [task_id, lead]).fetchone()
        decision = row[0] if row else _new_decision(db, lead, task_id)
        queue.lease(db, decision, lead)
        queue.reopen(lead, decision)


def _new_decision(db: Database, lead: str, task_id: int) -> int:
    row = db.execute(
        "INSERT INTO tasks (prompt_id, responses, purpose, open, decides, only_for, created_at)"
        " SELECT prompt_id, responses, purpose, 1, id, ?, ? FROM tasks t"
        " WHERE id = ? AND purpose IN ('rank', 'compare') AND decides IS NULL"
        " AND EXISTS (SELECT 1 FROM rankings r WHERE r.task_id = t.id) RETURNING id",
        [lead, time.time(), task_id],
    ).fetchone()
    if row is None:
        raise InputError(f"There is nothing to decide about task {task_id}", "Reload the page.")
    return int(row[0])


def opinions_on(connections: Connections, task: Task) -> list[Opinion]:
    """What people said about the task that this one settles, in an order that names nobody."""
    query = """SELECT tiers, flags, note FROM rankings
               WHERE task_id = ? AND live = 1 ORDER BY id"""
    shown = list(task.shown)
    return [
        Opinion(answer=in_letters(shown, tiers), flags=_flags(shown, flags), note=note)
        for tiers, flags, note in connections.db.execute(query, [task.decides])
    ]


def _flags(shown: list[str], stored: str) -> list[str]:
    """Flags for people: all-bad as it is, and unsafe@ID as "A unsafe"."""
    of_all, of_one = split_flags(read_flags(stored, is_from_board=True), shown)
    of_place = list(letters(shown).values())
    return [*of_all, *(f"{of_place[place]} {name}" for place, name in of_one)]


def decisions(connections: Connections, task_ids: list[int]) -> dict[int, str]:
    """The tiers, as JSON, that the latest decision gave each of these tasks."""
    query = """SELECT d.decides, r.tiers FROM json_each(?) wanted
               JOIN tasks d ON d.decides = wanted.value
               JOIN rankings r ON r.task_id = d.id AND r.live = 1 ORDER BY r.seq"""
    return dict(connections.db.execute(query, [json.dumps(task_ids)]).fetchall())
