"""The queue of work: which task an annotator gets next, drafts, submissions, skips, undo."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database

from labeling_app.db.board.checks import CheckRates, choose_check
from labeling_app.db.board.drafts import drop_draft, ranking_as_draft, read_draft, write_draft
from labeling_app.db.board.leases import (
    expire_leases,
    first_open,
    given_task,
    lease_task,
    own_lease,
    set_state,
    state_of,
)
from labeling_app.db.board.overlap import ask_another
from labeling_app.db.board.submission_ids import is_stored_skip, unless_stored
from labeling_app.db.board.tickets import ticket_of
from labeling_app.db.connection import Connections
from labeling_app.db.people.sources import SOURCES_OF_ME
from labeling_app.db.rankings import insert_ranking, ranking_in_task, retire, retire_in_task
from labeling_app.db.store import Store, ensure_annotator
from rlhf.errors import InputError
from rlhf.records.schema import Ranking

LEASE_SECONDS = 15 * 60.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task as one annotator sees it: the order of the responses and the ticket are theirs.

    `counts` says whether a ranking of theirs counts until they submit another: the task is open
    again.
    """

    id: int
    ticket: str
    messages: list[dict[str, str]]
    shown_order: tuple[str, ...]
    texts: tuple[str, ...]
    draft: dict[str, Any] | None
    purpose: str
    counts: bool
    adjudicates: int | None = None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A ranking as the browser sends it: positions in the order shown, best tier first."""

    id: str
    task_id: int
    tiers: tuple[tuple[int, ...], ...]
    strengths: tuple[int, ...] = ()
    response_flags: tuple[tuple[int, str], ...] = ()
    flags: tuple[str, ...] = ()
    note: str = ""
    duration_ms: int = 0
    rubric: str = ""


class TaskQueue:
    """The work of one database, for any number of annotators at once.

    Args:
        store: the database.
        lease_seconds: how long a task stays with an annotator who does nothing.
        checks: how often a task with a known answer is mixed in.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease_seconds: float = LEASE_SECONDS,
        checks: CheckRates = CheckRates(),  # noqa: B008 - frozen
    ) -> None:
        self.checks = checks
        self.connections: Connections = store.connections
        self.lease_seconds = lease_seconds

    def add_annotator(self, name: str) -> None:
        """Make sure that a person of this name exists.

        Raises:
            InputError: the name belongs to a judge or a signal.
        """
        with self.connections.write() as db:
            ensure_annotator(db, name, "human")

    def next_task(self, annotator: str) -> Task | None:
        """The task this annotator holds, or else a new one, leased; None when none is left."""
        with self.connections.write() as db:
            expire_leases(db)
            task_id = (
                own_lease(db, annotator)
                or choose_check(db, annotator, self.checks)
                or first_open(db, annotator)
            )
            if task_id is None:
                return None
            self.lease(db, task_id, annotator)
            return _load_task(db, task_id, annotator)

    def busy_elsewhere(self, annotator: str) -> tuple[int, float | None]:
        """How many tasks for this annotator others hold now, and when the first comes free."""
        query = f"""
            SELECT COUNT(*), MIN(expires_at) FROM assignments a JOIN tasks t ON t.id = a.task_id
            WHERE state = 'leased' AND expires_at > :now AND annotator <> :me
            AND t.open <= 0 AND t.only_for IS NULL
            AND (t.reserved IS NULL OR t.reserved IN ({SOURCES_OF_ME}))
            AND NOT EXISTS (
                SELECT 1 FROM assignments mine
                WHERE mine.task_id = a.task_id AND mine.annotator = :me
                AND mine.state <> 'expired')"""
        arguments = {"now": time.time(), "me": annotator}
        count, until = self.connections.db.execute(query, arguments).fetchone()
        return count, until

    def submit(self, annotator: str, submission: Submission) -> None:
        """Store a ranking; sending the same one again changes nothing, so a browser may retry.

        A second, different ranking of the same task by the same annotator takes the first one's
        place and adds to its time; the first stays in the database.

        Raises:
            InputError: the task was never shown to this annotator, the positions do not fit it, or
            something else was sent under this id.
        """
        task_id, strengths = submission.task_id, submission.strengths
        with self.connections.write() as db:
            prompt_id, shown_order = given_task(db, task_id, annotator)
            sent = _to_ranking(prompt_id, annotator, submission, shown_order)
            ranking = unless_stored(db, sent, task_id=task_id, strengths=strengths)
            if ranking is None:
                return
            old = ranking_in_task(db, task_id, annotator)
            if old is None or not _same_judgment(old, ranking, strengths):
                if old is not None:
                    retire(db, [old["id"]])
                insert_ranking(
                    db,
                    ranking,
                    task_id=task_id,
                    strengths=json.dumps(strengths),
                    shown=json.dumps(shown_order),
                    duration_ms=submission.duration_ms + (old["duration_ms"] or 0 if old else 0),
                    rubric=submission.rubric,
                    supersedes=old["id"] if old else None,
                )
            set_state(db, task_id, annotator, "done")
            drop_draft(db, task_id, annotator)
            ask_another(db, task_id)

    def skip(
        self,
        annotator: str,
        *,
        skip_id: str,
        task_id: int,
        reason: str,
        note: str,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Skip a task for this annotator; others still get it. A ranking of it is retired.

        The work on it, `state` or else the draft that is there, is kept for an undo.

        Raises:
            InputError: the task was never shown to this annotator, the draft is too large, or
            something else was sent under this id.
        """
        with self.connections.write() as db:
            given_task(db, task_id, annotator)
            if is_stored_skip(db, skip_id, task_id, annotator):
                return
            db.execute(
                "INSERT INTO skips VALUES (?, ?, ?, ?, ?, ?)",
                [skip_id, task_id, annotator, reason, note, time.time()],
            )
            set_state(db, task_id, annotator, "skipped")
            if state:
                write_draft(db, task_id, annotator, state)
            retire_in_task(db, task_id, annotator)

    def save_draft(self, annotator: str, task_id: int, state: dict[str, Any]) -> None:
        """Keep unfinished work and renew the lease.

        Raises:
            InputError: the draft is too large.
        """
        with self.connections.write() as db:
            state_now = state_of(db, task_id, annotator)
            # A draft that arrives after its submission is late, not new work.
            if state_now not in ("leased", "expired"):
                return
            write_draft(db, task_id, annotator, state)
            expires_at = time.time() + self.lease_seconds
            set_state(db, task_id, annotator, "leased", expires_at=expires_at)

    def undo(self, annotator: str) -> bool:
        """Open this annotator's last submission or skip again, with the work on it as the draft.

        The ranking stays live until another takes its place: an undo that is never finished loses
        nothing. Returns False when there is nothing to undo.
        """
        query = """
            SELECT task_id FROM (
                SELECT task_id, created_at FROM rankings
                WHERE annotator = :me AND live = 1 AND task_id IS NOT NULL AND shown IS NOT NULL
                UNION ALL SELECT task_id, created_at FROM skips WHERE annotator = :me)
            WHERE task_id NOT IN (
                SELECT task_id FROM assignments WHERE annotator = :me AND state = 'leased')
            ORDER BY created_at DESC LIMIT 1"""
        with self.connections.write() as db:
            row = db.execute(query, {"me": annotator}).fetchone()
            if row is not None:
                self.reopen(annotator, row[0])
            return row is not None

    def reopen(self, annotator: str, task_id: int) -> None:
        """Lease a task again to somebody who did or skipped it, with their work as the draft.

        Raises:
            InputError: the task was never shown to this annotator.
        """
        with self.connections.write() as db:
            _, shown_order = given_task(db, task_id, annotator)
            old = ranking_in_task(db, task_id, annotator)
            old = old or ranking_in_task(db, task_id, annotator, live=0)
            # A task that was reopened and left keeps its draft.
            stands = state_of(db, task_id, annotator) == "done"
            if old and (stands or read_draft(db, task_id, annotator) is None):
                write_draft(db, task_id, annotator, ranking_as_draft(old, shown_order))
            expires_at = time.time() + self.lease_seconds
            set_state(db, task_id, annotator, "leased", expires_at=expires_at)

    def lease(self, db: Database, task_id: int, annotator: str) -> None:
        """Give a task to an annotator, in an order shuffled once for the two of them."""
        lease_task(db, task_id, annotator, time.time() + self.lease_seconds)


def _load_task(db: Database, task_id: int, annotator: str) -> Task:
    query = """SELECT p.messages, t.purpose, t.decides, a.shown, o.ticket
               FROM assignments a JOIN tasks t ON t.id = a.task_id
               JOIN prompts p ON p.id = t.prompt_id
               LEFT JOIN tickets o ON o.task_id = a.task_id AND o.annotator = a.annotator
               WHERE a.task_id = ? AND a.annotator = ?"""
    messages, purpose, adjudicates, order, ticket = db.execute(
        query, [task_id, annotator]
    ).fetchone()
    shown_order = json.loads(order)
    texts = dict(_texts(db, shown_order))
    return Task(
        id=task_id,
        ticket=ticket or ticket_of(db, task_id, annotator),
        messages=json.loads(messages),
        shown_order=tuple(shown_order),
        texts=tuple(texts[response_id] for response_id in shown_order),
        draft=read_draft(db, task_id, annotator),
        purpose=purpose,
        counts=ranking_in_task(db, task_id, annotator) is not None,
        adjudicates=adjudicates,
    )


def _texts(db: Database, ids: list[str]) -> Iterator[tuple[str, str]]:
    marks = ", ".join("?" * len(ids))
    yield from db.execute(f"SELECT id, text FROM responses WHERE id IN ({marks})", ids)


def _to_ranking(
    prompt_id: str, annotator: str, submission: Submission, shown_order: list[str]
) -> Ranking:
    positions = [p for tier in submission.tiers for p in tier]
    flagged = [p for p, _ in submission.response_flags]
    fits = all(0 <= p < len(shown_order) for p in [*positions, *flagged]) and positions
    again = "Reload the page and rank it again."
    if not fits or len(submission.strengths) not in (0, len(submission.tiers) - 1):
        raise InputError(f"The ranking does not fit its {len(shown_order)} responses", again)
    # A `Ranking` would refuse this, too, but name response ids, which hash the models' names.
    if len(set(positions)) < len(positions) or not all(submission.tiers):
        raise InputError("A response is in two tiers, or a tier is empty", again)
    named = tuple(f"{flag}@{shown_order[position]}" for position, flag in submission.response_flags)
    return Ranking(
        id=submission.id,
        prompt_id=prompt_id,
        annotator=annotator,
        kind="human",
        tiers=tuple(tuple(shown_order[p] for p in tier) for tier in submission.tiers),
        # A strength left open is 0 on the board; a `Ranking` has them all or none.
        strengths=submission.strengths if all(submission.strengths) else (),
        flags=(*submission.flags, *named),
        note=submission.note,
    )


def _same_judgment(old: dict[str, Any], new: Ranking, strengths: tuple[int, ...]) -> bool:
    return (
        json.loads(old["tiers"]) == [list(tier) for tier in new.tiers]
        and json.loads(old["strengths"]) == list(strengths)
        and json.loads(old["flags"]) == list(new.flags)
        and bool(old["note"] == new.note)
    )
