"""A lead decides a task on which annotators disagree; exports take the lead's ranking instead.

A decision is a task of its own, for one lead, that refers to the task it decides. It is leased,
kept as a draft, submitted and changed like any other. The latest decision on a task counts.
"""

from dataclasses import dataclass

from labeling_app.db.connection import Connections
from labeling_app.db.queue import Task, TaskQueue
from labeling_app.db.reports import rankings_of_task
from labeling_app.db.tasks import decision_task
from labeling_app.quality.history import in_letters, letters
from labeling_app.rankings.flags import read_flags, split_flags
from rlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """One annotator's ranking, anonymous and in the letters of the lead's own screen."""

    answer: str
    flags: list[str]
    note: str


def open_decision(queue: TaskQueue, lead: str, task_id: int) -> None:
    """Give this lead the decision on a task as the next thing to do.

    Raises:
        InputError: there is no such task, or nobody has ranked it.
    """
    with queue.connections.write() as db:
        decision = decision_task(db, task_id, lead)
        if decision is None:
            raise InputError(f"There is nothing to decide about task {task_id}", "Reload the page.")
        queue.lease(db, decision, lead)
        queue.reopen(lead, decision)


def opinions_on(connections: Connections, task: Task) -> list[Opinion]:
    """The rankings of the task that this one decides, in an order that names nobody."""
    shown = list(task.shown)
    return [
        Opinion(answer=in_letters(shown, tiers), flags=_flags(shown, flags), note=note)
        for tiers, flags, note in rankings_of_task(connections, task.decides)
    ]


def _flags(shown: list[str], stored: str) -> list[str]:
    """Flags for people: all-bad as it is, and unsafe@ID as "A unsafe"."""
    of_all, of_one = split_flags(read_flags(stored, is_from_board=True), shown)
    of_place = list(letters(shown).values())
    return [*of_all, *(f"{of_place[place]} {name}" for place, name in of_one)]
