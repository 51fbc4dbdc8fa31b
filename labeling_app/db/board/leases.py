"""Assignments: which annotator holds, has done or has skipped which task.

`tasks.open` is how many more people a task wants: its overlap (and one where people differ, see
`overlap.py`), less those who ranked it, less those who hold a live lease; below 0 where more have
ranked it than were asked, as after an import. Every change of an assignment keeps it right in the
same transaction, so the next task is one step in an index.
"""

import json
import random
import time

from sqlite_utils import Database

from labeling_app.db.board.queue_position import first_in_queue
from labeling_app.db.board.tickets import add_ticket
from labeling_app.db.people.sources import sources_of
from labeling_app.db.rankings import ranking_in_task
from labeling_app.db.tasks import change_open
from rlhf.errors import InputError


def lease_task(db: Database, task_id: int, annotator: str, expires_at: float) -> None:
    """Give a task to an annotator, in an order shuffled once for the two of them."""
    if state_of(db, task_id, annotator) is not None:
        set_state(db, task_id, annotator, "leased", expires_at=expires_at)
        return
    [ids] = db.execute("SELECT responses FROM tasks WHERE id = ?", [task_id]).fetchone()
    shown_order = json.loads(ids)
    random.shuffle(shown_order)
    db.execute(
        "INSERT INTO assignments VALUES (?, ?, 'leased', ?, ?, ?)",
        [task_id, annotator, json.dumps(shown_order), expires_at, time.time()],
    )
    add_ticket(db, task_id, annotator)
    change_open(db, task_id, -1)


def finish_unseen(db: Database, task_id: int, annotator: str) -> None:
    """Count a task as done by somebody who ranked its responses elsewhere."""
    lease_task(db, task_id, annotator, 0.0)
    set_state(db, task_id, annotator, "done")


def own_lease(db: Database, annotator: str) -> int | None:
    """The task that this annotator holds, the latest if several."""
    query = """SELECT task_id FROM assignments WHERE annotator = ? AND state = 'leased'
               ORDER BY updated_at DESC LIMIT 1"""
    row = db.execute(query, [annotator]).fetchone()
    return row[0] if row else None


def first_open(db: Database, annotator: str) -> int | None:
    """The open task of highest priority that this annotator has neither ranked nor skipped.

    One whose lease ran out comes first: the draft, if any, is still there. Tasks of the sources
    that were given to this annotator come before those for everybody. The prompt of the work before
    comes again only if nothing else is open: as a vote after a ranking, say, it looks like an error
    of the board.
    """
    query = """SELECT a.task_id FROM drafts d JOIN assignments a USING (task_id, annotator)
               JOIN tasks t ON t.id = a.task_id
               WHERE d.annotator = ? AND a.state = 'expired' AND t.open > 0
               ORDER BY d.updated_at DESC LIMIT 1"""
    row = db.execute(query, [annotator]).fetchone()
    if row:
        return int(row[0])
    last = last_prompt(db, annotator)
    task_id = _first_but(db, annotator, last)
    return _first_but(db, annotator, None) if task_id is None and last is not None else task_id


def _first_but(db: Database, annotator: str, prompt_id: str | None) -> int | None:
    """The first open task about another prompt than this one."""
    query = """SELECT id FROM tasks t WHERE open > 0 AND only_for = :me AND prompt_id IS NOT :but
               AND NOT EXISTS (SELECT 1 FROM assignments a WHERE a.task_id = t.id
                   AND a.annotator = :me AND a.state <> 'expired')
               ORDER BY id LIMIT 1"""
    row = db.execute(query, {"me": annotator, "but": prompt_id}).fetchone()
    if row:
        return int(row[0])
    sources = sources_of(db, annotator)
    given = [first_in_queue(db, annotator, source, but=prompt_id) for source in sources]
    best = min(
        (position for position in given if position),
        key=lambda position: (-position[0], position[1]),
        default=None,
    )
    best = best or first_in_queue(db, annotator, None, but=prompt_id)
    return best[1] if best else None


def last_prompt(db: Database, annotator: str) -> str | None:
    """The prompt that an annotator has ranked or skipped last; None before any work."""
    ranked = """SELECT created_at, prompt_id FROM rankings WHERE annotator = ? AND live = 1
                ORDER BY created_at DESC LIMIT 1"""
    skipped = """SELECT s.created_at, t.prompt_id FROM skips s JOIN tasks t ON t.id = s.task_id
                 WHERE s.annotator = ? ORDER BY s.created_at DESC LIMIT 1"""
    rows = [db.execute(query, [annotator]).fetchone() for query in (ranked, skipped)]
    return max((row for row in rows if row), default=(0.0, None))[1]


def expire_leases(db: Database) -> None:
    """End the leases whose time is over; a task ranked before counts as done again."""
    query = "SELECT task_id, annotator FROM assignments WHERE state = 'leased' AND expires_at < ?"
    for task_id, annotator in db.execute(query, [time.time()]).fetchall():
        done = ranking_in_task(db, task_id, annotator) is not None
        set_state(db, task_id, annotator, "done" if done else "expired")


def state_of(db: Database, task_id: int, annotator: str) -> str | None:
    """The state of a task for an annotator; None where it was never given."""
    query = "SELECT state FROM assignments WHERE task_id = ? AND annotator = ?"
    row = db.execute(query, [task_id, annotator]).fetchone()
    return row[0] if row else None


def set_state(
    db: Database, task_id: int, annotator: str, state: str, *, expires_at: float = 0.0
) -> None:
    """Move an assignment to a state and keep `tasks.open` right: leased and done hold a place."""
    before = state_of(db, task_id, annotator)
    holding_states = ("leased", "done")
    change = (before in holding_states) - (state in holding_states)
    db.execute(
        "UPDATE assignments SET state = ?, expires_at = ?, updated_at = ?"
        " WHERE task_id = ? AND annotator = ?",
        [state, expires_at, time.time(), task_id, annotator],
    )
    if change:
        change_open(db, task_id, change)


def given_task(db: Database, task_id: int, annotator: str) -> tuple[str, list[str]]:
    """The prompt of a task, and its responses in the order this annotator was shown.

    Raises:
        InputError: it was never given to them.
    """
    query = """SELECT t.prompt_id, a.shown FROM assignments a JOIN tasks t ON t.id = a.task_id
               WHERE a.task_id = ? AND a.annotator = ?"""
    row = db.execute(query, [task_id, annotator]).fetchone()
    if row is None:
        raise InputError(
            f"Task {task_id} was never given to {annotator}", "Reload the page to get a task."
        )
    return row[0], json.loads(row[1])
