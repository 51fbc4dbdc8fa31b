"""The board's protocol: plain JSON in, plain JSON out.

Every answer has `ok`. A refusal has `error`, a sentence for the annotator, and `retry`: whether
sending the same again may help. Model names and ids of the database never leave the server:
responses are positions in the order shown, tasks are tickets.
"""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlite_utils import Database

from labeling_app.db.board.rubrics import current_version, rubric_text, save_rubric_file
from labeling_app.db.board.tickets import task_of, ticket_of
from labeling_app.db.queue import Task, TaskQueue
from labeling_app.db.rankings import num_done
from labeling_app.db.store import Store
from labeling_app.quality.adjudication import open_adjudication, opinions_on
from labeling_app.quality.checks import feedback_on
from labeling_app.quality.history import recent_work
from labeling_app.quality.truncation import cut_offs
from labeling_app.web.board.rendering import to_html
from labeling_app.web.board.screens import Unrendered, render_quick
from labeling_app.web.board.submissions import (
    MAX_NOTE_CHARACTERS,
    MAX_REASON,
    SHOWN_CHARACTERS,
    read_id,
    read_state,
    read_submission,
    read_text,
    read_ticket,
    read_whole_number,
)
from rlhf.errors import InputError

FLAGS = ("unsafe", "untrue", "off-topic", "broken")
SKIP_REASONS = ("I don't know enough", "Prompt makes no sense", "Too long", "Upsetting")

Payload = dict[str, Any]


@dataclass(frozen=True)
class BoardRequest:
    """A request from somebody's browser; leads may also adjudicate."""

    annotator: str
    payload: Payload
    may_lead: bool = False


class Board:
    """The operations of the board over one database.

    Args:
        store: the database.
        queue: its tasks.
        has_sign_in: whether people sign in, and so can sign out.
        rubric: the instructions for judging, as markdown; shown beside the task. "" keeps those
            that the database has.
        flags: the flags a response can get.
    """

    def __init__(
        self,
        store: Store,
        queue: TaskQueue,
        *,
        has_sign_in: bool = False,
        rubric: str = "",
        flags: tuple[str, ...] = FLAGS,
    ) -> None:
        self.has_sign_in = has_sign_in
        self.flags = flags
        if rubric:
            save_rubric_file(store.connections, rubric)
        self._rubric = {"version": "", "html": ""}
        self.board_id = store.board_id
        self.store = store
        self.queue = queue
        self._operations: dict[str, Callable[[str, Payload], None]] = {
            "next": lambda annotator, payload: None,
            "submit": self._submit,
            "skip": self._skip,
            "undo": self._undo,
            "open": self._open,
            "decide": self._adjudicate,
        }

    @property
    def rubric(self) -> Payload:
        """The version that the board shows now, and its HTML."""
        db = self.store.connections.db
        version = current_version(db)
        if version != self._rubric["version"]:
            self._rubric = {"version": version, "html": to_html(rubric_text(db, version))}
        return self._rubric

    def answer_all(self, requests: Sequence[BoardRequest]) -> list[Payload]:
        """The next screens of several people, in one transaction, which waits for the disk once.

        Texts that may be slow to render are left to the caller; see `screens.py`.

        If the transaction fails, each request gets its own; but not if another program has locked
        the file: waiting for that once is enough.
        """
        try:
            with self.store.connections.write() as db:
                screens = [self._answer_in_savepoint(db, request) for request in requests]
        except sqlite3.Error as error:
            is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if len(requests) > 1 and not is_busy:
                return [self.answer_all([request])[0] for request in requests]
            problem = f"The database could not write ({error}). Your draft is kept."
            return [refusal(problem, retry=True)] * len(requests)
        return [render_quick(screen) for screen in screens]

    def _answer_in_savepoint(self, db: Database, request: BoardRequest) -> Payload:
        """A refused request is rolled back alone."""
        if request.payload.get("op") == "decide" and not request.may_lead:
            return refusal("Only leads can decide disputed tasks.")
        try:
            with db.atomic():
                return self._answer(request.annotator, request.payload)
        except InputError as error:
            return refusal(f"{error.problem}. {error.remedy}")
        except (LookupError, TypeError, ValueError, OverflowError):
            # Not the error's own message, which may contain ids of the database.
            return refusal("The request is malformed. Reload the page.")

    def _answer(self, annotator: str, payload: Payload) -> Payload:
        name = payload.get("op")
        if name == "draft":
            self._draft(annotator, payload)
            return {"ok": True}
        if name == "history":
            return {"ok": True, "past": self._history(annotator)}
        operation = self._operations.get(str(name))
        if operation is None:
            return refusal(f"Unknown operation {name!r:.{SHOWN_CHARACTERS}}. Reload the page.")
        operation(annotator, payload)
        screen = self._screen(annotator, self.queue.next_task(annotator))
        if name == "submit":
            screen["feedback"] = self._feedback(annotator, payload)
        return screen

    def _submit(self, annotator: str, payload: Payload) -> None:
        task_id = self._task_id(annotator, payload)
        self.queue.submit(annotator, read_submission(payload, task_id, self.flags))

    def _task_id(self, annotator: str, payload: Payload) -> int:
        return task_of(self.store.connections.db, read_ticket(payload), annotator)

    def _feedback(self, annotator: str, payload: Payload) -> Payload | None:
        task_id = self._task_id(annotator, payload)
        feedback = feedback_on(self.store.connections, annotator, task_id)
        if feedback is None:
            return None
        return {**asdict(feedback), "explanation": Unrendered(feedback.explanation)}

    def _skip(self, annotator: str, payload: Payload) -> None:
        self.queue.skip(
            annotator,
            skip_id=read_id(payload),
            task_id=self._task_id(annotator, payload),
            reason=read_text(payload, "reason", MAX_REASON),
            note=read_text(payload, "note", MAX_NOTE_CHARACTERS),
            state=read_state(payload),
        )

    def _undo(self, annotator: str, payload: Payload) -> None:
        if not self.queue.undo(annotator):
            raise InputError("There is nothing to undo", "Rank a task first.")

    def _open(self, annotator: str, payload: Payload) -> None:
        self.queue.reopen(annotator, self._task_id(annotator, payload))

    def _adjudicate(self, annotator: str, payload: Payload) -> None:
        open_adjudication(self.queue, annotator, read_whole_number(payload, "task_id"))

    def _history(self, annotator: str) -> list[Payload]:
        db = self.store.connections.db
        history = []
        for past in recent_work(self.store.connections, annotator):
            ticket = ticket_of(db, past.task_id, annotator)
            # pages loaded before an upgrade read it under the name of the number, which stays here
            history.append({**asdict(past), "ticket": ticket, "task_id": ticket})
        return history

    def _draft(self, annotator: str, payload: Payload) -> None:
        self.queue.save_draft(annotator, self._task_id(annotator, payload), read_state(payload))

    def _screen(self, annotator: str, task: Task | None) -> Payload:
        """The task to show, the person's progress, and the reason if there is no task.

        Progress counts what the person has done. The number of open tasks is on the dashboard only:
        a check does not change it, so people could recognize checks by it.
        """
        return {
            "ok": True,
            "board": self.board_id,
            "annotator": annotator,
            "has_sign_in": self.has_sign_in,
            "done": num_done(self.store.connections, annotator),
            "flags": self.flags,
            "rubric": self.rubric,
            "skip_reasons": SKIP_REASONS,
            "task": self._task_payload(task) if task else None,
            "opinions": self._opinions(task),
            "nothing_left": "" if task else self._nothing_left(annotator),
            "lead_link": None if task else self._lead_link(),
        }

    def _task_payload(self, task: Task) -> Payload:
        """A task for the browser: texts and positions, no ids and no names."""
        endings = cut_offs(self.store.connections, task.shown_order)
        return {
            "ticket": task.ticket,
            "id": task.ticket,  # what pages loaded before an upgrade read
            "prompt": [
                {"role": turn["role"], "html": Unrendered(turn["content"], turn["role"])}
                for turn in task.messages
            ],
            "cards": [
                {"html": Unrendered(text, "assistant"), "characters": len(text), "ending": ending}
                for text, ending in zip(task.texts, endings, strict=True)
            ],
            "draft": task.draft,
            "counts": task.counts,
        }

    def _opinions(self, task: Task | None) -> list[Payload]:
        if task is None or task.adjudicates is None:
            return []
        return [asdict(opinion) for opinion in opinions_on(self.store.connections, task)]

    def _nothing_left(self, annotator: str) -> str:
        num_busy, until = self.queue.busy_elsewhere(annotator)
        if num_busy and until is not None:
            tasks = "1 task is" if num_busy == 1 else f"{num_busy} tasks are"
            clock = datetime.fromtimestamp(until).strftime("%H:%M")
            return f"{tasks} reserved for other people until {clock}. Reload the page then."
        if not self.store.counts()["tasks"]:
            problem = "There is nothing to rank yet: no prompt has two responses."
            return f"{problem} Tasks appear here by themselves as soon as there are some."
        return "You have ranked everything. Thank you!"

    def _lead_link(self) -> tuple[str, str]:
        """Words and address of what a lead may do when there is no task; others do not see it."""
        if self.store.counts()["tasks"]:
            return "See how people agree", "/lead/quality"
        return "See what has to be done first", "/lead/data"


def refusal(error: str, *, retry: bool = False) -> Payload:
    """A refusal; with `retry` the browser sends the same request again by itself."""
    return {"ok": False, "error": error, "retry": retry}
