"""Imports under way: stored in small transactions, seen by nobody before they are whole.

Every row of an import holds its number. Until the import is finished, queries leave its rows out
(`SHOWN`), so nobody ranks, samples for or exports half of it; then one small transaction shows all
of them. Only the tasks are made after that, again in small transactions: a whole import comes into
the queue bit by bit. What failed is taken back at once. What was killed stays unseen, and the next
import or start of the board takes it back or, where only tasks were missing, makes them.

One import at a time, by a lock on a file beside the database. Whoever else adds a row that an
import holds already makes it a row of their own (`adopt`), which taking back leaves alone.
"""

import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from sqlite_utils import Database

from labeling_app.db.board.checks import make_check
from labeling_app.db.connection import SHOWN, Connections
from labeling_app.db.tasks import CheckPurpose, queue_tasks
from rlhf.errors import InputError, InterruptedRunError
from rlhf.records.schema import Ranking

Item = TypeVar("Item")
TABLES = ("rankings", "responses", "prompts")
WAIT_SECONDS = 60.0
CHUNK_SECONDS = 0.04
CHUNK_ROWS = 200
READ_AHEAD = 50  # lines


@dataclass(kw_only=True)
class Checks:
    """How many checks an import made, and which it could not."""

    made: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Import:
    """An import under way; when it has ended well, what became of its checks."""

    id: int
    checks: Checks = field(default_factory=Checks)


@contextmanager
def importing(connections: Connections, source: str) -> Iterator[Import]:
    """Around storing what one file holds: all of it is shown at the end, or taken back.

    Args:
        connections: the database.
        source: the file's name, kept with the import.

    Raises:
        InterruptedRunError: another import does not end within a minute, or the disk is full.
    """
    with _lock(connections.path, WAIT_SECONDS), _naming_full_disk(source):
        clear_away(connections)
        current = Import(id=_begin(connections, source))
        try:
            yield current
        except BaseException:
            with suppress(sqlite3.OperationalError):  # a full disk; the next import tries again
                take_back(connections, current.id)
            raise
        _finish(connections, current.id)
        current.checks = make_tasks(connections)


@contextmanager
def _naming_full_disk(source: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an error of our own has none
        if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise
        raise InterruptedRunError(
            f"The database has no room for {source} ({error}); nothing of it is shown",
            "Free some space, then run the same command again.",
        ) from None


def recover(connections: Connections) -> None:
    """Clear away what a killed import left, unless an import is under way."""
    with suppress(InterruptedRunError), _lock(connections.path, 0):
        clear_away(connections)


def clear_away(connections: Connections) -> None:
    """Take back what is unfinished, and make the tasks of what is finished."""
    query = "SELECT id FROM imports WHERE finished_at IS NULL"
    for (import_id,) in connections.db.execute(query).fetchall():
        take_back(connections, import_id)
    make_tasks(connections)


@contextmanager
def _lock(database: Path, wait_seconds: float) -> Iterator[None]:
    path = database.with_name(f"{database.name}-import")
    try:
        with FileLock(path, timeout=wait_seconds):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # whoever waits for it sees that, and makes a new one
    except Timeout:
        raise InterruptedRunError(
            f"Another import into {database} is under way", "Wait for its end, then run it again."
        ) from None


def _begin(connections: Connections, source: str) -> int:
    """Begin an import of a file and return its number."""
    with connections.write() as db:
        query = "INSERT INTO imports (source, started_at) VALUES (?, ?)"
        return int(db.execute(query, [source, time.time()]).lastrowid or 0)


def _finish(connections: Connections, import_id: int) -> None:
    """Show an import: from now on its rows are like all others."""
    with connections.write() as db:
        db.execute("UPDATE imports SET finished_at = ? WHERE id = ?", [time.time(), import_id])
        db.execute("DELETE FROM import_annotators")


def take_back(connections: Connections, import_id: int) -> None:
    """Remove every row of an import that is not finished."""
    db = connections.db
    # No visible row refers to a hidden one, and looking for one takes a scan for every row.
    db.execute("PRAGMA foreign_keys = OFF")
    try:
        for table in (*TABLES, "import_tasks"):
            _delete(connections, table, import_id)
    finally:
        db.execute("PRAGMA foreign_keys = ON")
    with connections.write() as db:
        for (name,) in db.execute("SELECT name FROM import_annotators").fetchall():
            with suppress(sqlite3.IntegrityError), db.atomic():  # somebody stands by that name now
                db.execute("DELETE FROM annotators WHERE name = ?", [name])
        db.execute("DELETE FROM import_annotators")
        db.execute("DELETE FROM imports WHERE id = ?", [import_id])


def _delete(connections: Connections, table: str, import_id: int) -> None:
    query = f"""DELETE FROM {table} WHERE seq IN (SELECT seq FROM {table}
                WHERE import_id > 0 AND import_id = ? LIMIT {CHUNK_ROWS})"""
    num_deleted = 1
    while num_deleted:
        with _short_write(connections) as db:
            num_deleted = db.execute(query, [import_id]).rowcount


# ------------------------------------------------------------------------ tasks of a whole import


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check to be made when its import is whole."""

    place: str
    answer: Ranking
    responses: list[str]
    purpose: CheckPurpose
    explanation: str


def put_off_tasks(db: Database, import_id: int, prompt_ids: Iterable[str]) -> None:
    """Note that these prompts get a task when their import is whole."""
    rows = ([import_id, prompt_id] for prompt_id in prompt_ids)
    db.conn.executemany("INSERT INTO import_tasks (import_id, prompt_id) VALUES (?, ?)", rows)


def put_off_check(db: Database, import_id: int, check: Check) -> None:
    """Note a gold or training task to make."""
    content = json.dumps({**vars(check), "answer": check.answer.to_json()})
    query = "INSERT INTO import_tasks (import_id, prompt_id, content) VALUES (?, ?, ?)"
    db.execute(query, [import_id, check.answer.prompt_id, content])


def make_tasks(connections: Connections) -> Checks:
    """Make the tasks that were put off, in the order of the lines they come from."""
    checks = Checks()

    def make(db: Database, row: tuple[int, str, str | None]) -> None:
        seq, prompt_id, content = row
        if content is None:
            queue_tasks(db, [prompt_id])
        else:
            _make_check(connections, content, checks)
        db.execute("DELETE FROM import_tasks WHERE seq = ?", [seq])

    write_in_chunks(connections, _put_off(connections), make)
    return checks


def _put_off(connections: Connections) -> Iterator[tuple[int, str, str | None]]:
    query = f"""SELECT seq, prompt_id, content FROM import_tasks WHERE seq > ? AND {SHOWN}
                ORDER BY seq LIMIT {CHUNK_ROWS}"""
    last = 0
    while rows := connections.db.execute(query, [last]).fetchall():
        yield from rows
        last = rows[-1][0]


def _make_check(connections: Connections, content: str, checks: Checks) -> None:
    stored = json.loads(content)
    place = stored.pop("place")
    stored["answer"] = Ranking.from_json(stored["answer"])
    try:
        checks.made += make_check(connections, **stored)
    except InputError as error:
        checks.refused.append(f"{place}: {error.problem}")


# ------------------------------------------------------------------------------ small transactions


def write_in_chunks(
    connections: Connections, items: Iterable[Item], write: Callable[[Database, Item], None]
) -> None:
    """Write every item, in transactions so short that people on the board do not notice them.

    Items are read ahead, outside of the transactions: they may come from a file or a network.
    """
    remaining = iter(items)
    while waiting := deque(islice(remaining, READ_AHEAD)):
        while waiting:
            with _short_write(connections) as db:
                give_up = time.monotonic() + CHUNK_SECONDS
                while waiting and time.monotonic() < give_up:
                    write(db, waiting.popleft())


@contextmanager
def _short_write(connections: Connections) -> Iterator[Database]:
    """A transaction, and then as long a time in which others find the database free.

    Who waits for SQLite's lock does not queue but looks again, every 100 ms in the end: half of
    the time free, 99 of 100 find it so within a quarter of a second.
    """
    with connections.write() as db:
        began = time.monotonic()
        yield db
    time.sleep(time.monotonic() - began)
