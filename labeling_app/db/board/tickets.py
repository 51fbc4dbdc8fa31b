"""Tickets: the random id under which an annotator's browser knows a task.

Task numbers would give away repeats, which are made last, and gold tasks. A ticket stays the same
over reloads and restarts, as does the order in which the responses are shown.
"""

import secrets

from sqlite_utils import Database

from rlhf.errors import InputError

SHOWN_CHARACTERS = 20


def add_ticket(db: Database, task_id: int, annotator: str) -> str:
    """Make the ticket of a task that an annotator is given, and return it."""
    ticket = secrets.token_hex(16)
    db.execute("INSERT INTO tickets VALUES (?, ?, ?)", [task_id, annotator, ticket])
    return ticket


def ticket_of(db: Database, task_id: int, annotator: str) -> str:
    """The ticket of an annotator's task; made now where an older version gave it out."""
    query = "SELECT ticket FROM tickets WHERE task_id = ? AND annotator = ?"
    row = db.execute(query, [task_id, annotator]).fetchone()
    return str(row[0]) if row else add_ticket(db, task_id, annotator)


def task_of(db: Database, ticket: str, annotator: str) -> int:
    """The task that an annotator was given under a ticket.

    Raises:
        InputError: it is no ticket of this annotator's.
    """
    query = "SELECT task_id FROM tickets WHERE annotator = ? AND ticket = ?"
    row = db.execute(query, [annotator, ticket]).fetchone()
    if row is None:
        raise InputError(
            f"Task {ticket[:SHOWN_CHARACTERS]} was never given to {annotator}",
            "Reload the page to get a task.",
        )
    return int(row[0])
