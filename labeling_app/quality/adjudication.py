"""A lead adjudicates a task on which annotators disagree; exports take the lead's ranking instead.

An adjudication is a task of its own, for one lead, that refers to the task it adjudicates. It is
leased, kept as a draft, submitted and changed like any other. The latest one of a task counts.
Pages call it a decision.
"""

from dataclasses import dataclass

from labeling_app.db.connection import Connections
from labeling_app.db.queue import Task, TaskQueue
from labeling_app.db.reports import rankings_of_task
from labeling_app.db.tasks import adjudication_task
from labeling_app.quality.history import in_letters, letters
from labeling_app.rankings.flags import read_flags, split_flags
from rlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """One annotator's ranking, anonymous and in the letters of the lead's own screen."""

    answer: str
    flags: list[str]
    note: str


def open_adjudication(queue: TaskQueue, lead: str, task_id: int) -> None:
    """Give this lead the adjudication of a task as the next thing to do.

    Raises:
        InputError: there is no such task, or nobody has ranked it.
    """
    with queue.connections.write() as db:
        adjudication = adjudication_task(db, task_id, lead)
        if adjudication is None:
            raise InputError(f"There is nothing to decide about task {task_id}", "Reload the page.")
        queue.lease(db, adjudication, lead)
        queue.reopen(lead, adjudication)


def opinions_on(connections: Connections, task: Task) -> list[Opinion]:
    """The rankings of the task that this one adjudicates, in an order that names nobody."""
    shown_order = list(task.shown_order)
    return [
        Opinion(answer=in_letters(shown_order, tiers), flags=_flags(shown_order, flags), note=note)
        for tiers, flags, note in rankings_of_task(connections, task.adjudicates)
    ]


def _flags(shown_order: list[str], stored: str) -> list[str]:
    """Flags for people: all-bad as it is, and unsafe@ID as "A unsafe"."""
    of_all, of_one = split_flags(read_flags(stored, is_from_board=True), shown_order)
    letter_at = list(letters(shown_order).values())
    return [*of_all, *(f"{letter_at[position]} {name}" for position, name in of_one)]
