"""Imports in progress: stored in small transactions, hidden until all of their rows are there.

Every row of an import carries its number. Until the import is finished, queries leave its rows out
(`VISIBLE`), so nobody ranks, samples for or exports half of it; then one small transaction shows
them all. Their tasks are made afterwards and linked to imported judgments, again in small
transactions, so the queue fills gradually. A failed import is rolled back at once. A killed one
stays hidden, and the next import or start of the board rolls it back or, where only tasks were
missing, makes them.

One import runs at a time, by a file lock beside the database. A row of an unfinished import that
somebody else adds too becomes theirs (`make_visible`), and rolling back leaves it.
"""

import json
import sqlite3
import sys
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
from labeling_app.db.connection import VISIBLE, Connections
from labeling_app.db.imports.judgments import link_judgments
from labeling_app.db.imports.replacing import Replaced, count_again, replace_earlier
from labeling_app.db.tasks import CheckPurpose, queue_tasks
from rlhf.errors import InputError, InterruptedRunError
from rlhf.records.schema import Ranking

Item = TypeVar("Item")
TABLES = ("rankings", "responses", "prompts")
WAIT_SECONDS = 60.0
CHUNK_SECONDS = 0.04
CHUNK_ROWS = 200
READ_AHEAD = 50  # lines
LINK = "link"


@dataclass(kw_only=True)
class Checks:
    """How many checks an import made, and which it could not."""

    made: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Import:
    """An import in progress; after its end, which of its checks were made, and what it replaced."""

    id: int
    given: set[str] | None = None
    """The ids of its rankings, old and new, if it replaces those of earlier imports."""
    returned: set[str] = field(default_factory=set)
    """The ids of those of its rankings that an import has replaced."""
    num_returned: int = 0
    """How many of them count again."""
    checks: Checks = field(default_factory=Checks)
    replaced: Replaced | None = None


@contextmanager
def importing(
    connections: Connections, source: str, *, name: str = "", replace: bool = False
) -> Iterator[Import]:
    """Store the content of one file: all of it is shown at the end, or none is kept.

    Args:
        connections: the database.
        source: the file's name, kept with the import.
        name: the source of its prompts, by which later imports can replace its rankings.
        replace: when all of it is shown, retire what earlier imports of that name gave, except for
            what is in `given`, which whoever stores the content fills.

    Raises:
        InterruptedRunError: another import does not end within a minute, the disk is full, or
            another program has rolled this import back.
    """
    with _lock(connections.path, WAIT_SECONDS):
        with _naming_full_disk(f"for {source}", "nothing of it is shown"):
            clean_up(connections)
            given = set[str]() if replace else None
            current = Import(id=_begin(connections, source, name), given=given)
            try:
                yield current
            except BaseException:
                with suppress(sqlite3.OperationalError):  # a full disk; the next import tries again
                    roll_back(connections, current.id)
                raise
            _finish(connections, current)
        with _naming_full_disk(
            f"for the tasks of {source}", "its prompts, responses and rankings are stored"
        ):
            current.checks = make_deferred_tasks(connections)


@contextmanager
def _naming_full_disk(purpose: str, outcome: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an error of our own has none
        if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise
        raise InterruptedRunError(
            f"The database has no room {purpose} ({error}); {outcome}",
            "Free some space, then run the same command again.",
        ) from None


def num_hidden(connections: Connections) -> int:
    """How many rows imports that are under way have stored so far."""
    unfinished = "(SELECT id FROM imports WHERE finished_at IS NULL)"
    counts = (
        f"(SELECT COUNT(*) FROM {table} WHERE import_id > 0 AND import_id IN {unfinished})"
        for table in TABLES
    )
    return int(connections.db.execute(f"SELECT {' + '.join(counts)}").fetchone()[0])


def recover(connections: Connections) -> None:
    """Clean up after a killed import, unless an import is running."""
    with suppress(InterruptedRunError), _lock(connections.path, 0):
        clean_up(connections)


def clean_up(connections: Connections) -> None:
    """Roll unfinished imports back, and make the missing tasks of finished ones.

    Gold and training tasks that cannot be made are reported on stderr, because the import that
    would have reported them was interrupted.
    """
    query = "SELECT id FROM imports WHERE finished_at IS NULL"
    for (import_id,) in connections.db.execute(query).fetchall():
        roll_back(connections, import_id)
    refused = make_deferred_tasks(connections).refused
    if refused:
        sys.stderr.write(
            "An interrupted import was completed. Gold or training tasks that were not made: "
            f"{len(refused)}, the first: {refused[0]}\n"
        )


@contextmanager
def _lock(database: Path, wait_seconds: float) -> Iterator[None]:
    path = database.resolve()  # one lock for all names of a file
    path = path.with_name(f"{path.name}-import")
    try:
        with FileLock(path, timeout=wait_seconds):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # a waiting process notices and creates a new one
    except Timeout:
        raise InterruptedRunError(
            f"Another import into {database} is running", "Wait until it ends, then run this again."
        ) from None


def _begin(connections: Connections, source: str, name: str) -> int:
    """Begin an import of a file and return its number."""
    with connections.write() as db:
        query = "INSERT INTO imports (source, name, started_at) VALUES (?, ?, ?)"
        return int(db.execute(query, [source, name, time.time()]).lastrowid or 0)


def _finish(connections: Connections, current: Import) -> None:
    """Show the rows of an import from now on, in place of those that it replaces."""
    with connections.write() as db:
        _require_unfinished(db, current.id)
        if current.given is not None:
            current.replaced = replace_earlier(db, current.id, current.given)
            for prompt_id in sorted(current.replaced.prompts):
                defer_link(db, current.id, prompt_id)
        returned = count_again(db, current.returned)
        current.num_returned = len(returned)
        for prompt_id in sorted(set(returned)):
            defer_link(db, current.id, prompt_id)
        db.execute("UPDATE imports SET finished_at = ? WHERE id = ?", [time.time(), current.id])
        db.execute("DELETE FROM import_annotators")


def _require_unfinished(db: Database, import_id: int) -> None:
    """Check that nobody has rolled an import back, or its further rows would be shown at once.

    Raises:
        InterruptedRunError: another program has, as it can where locks of files do not work.
    """
    query = "SELECT 1 FROM imports WHERE id = ? AND finished_at IS NULL"
    if not db.execute(query, [import_id]).fetchone():
        raise InterruptedRunError(
            "Another program has rolled this import back; nothing of the file is stored",
            "Run the same command again, on the machine that serves the board.",
        )


def roll_back(connections: Connections, import_id: int) -> None:
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
        # Whoever stores this import may have added rows meanwhile; from now on it cannot.
        for table in (*TABLES, "import_tasks"):
            db.execute(f"DELETE FROM {table} WHERE import_id > 0 AND import_id = ?", [import_id])
        if not db.execute("DELETE FROM imports WHERE id = ?", [import_id]).rowcount:
            return  # rolled back before; the annotators are those of another import
        for (name,) in db.execute("SELECT name FROM import_annotators").fetchall():
            with suppress(sqlite3.IntegrityError), db.atomic():  # somebody uses that name now
                db.execute("DELETE FROM annotators WHERE name = ?", [name])
        db.execute("DELETE FROM import_annotators")


def _delete(connections: Connections, table: str, import_id: int) -> None:
    query = f"""DELETE FROM {table} WHERE seq IN (SELECT seq FROM {table}
                WHERE import_id > 0 AND import_id = ? LIMIT {CHUNK_ROWS})"""
    num_deleted = 1
    while num_deleted:
        with _short_write(connections) as db:
            num_deleted = db.execute(query, [import_id]).rowcount


# ------------------------------------------------------------------------ tasks of finished imports


@dataclass(frozen=True, kw_only=True)
class Check:
    """A gold or training task to make when its import is finished."""

    location: str
    answer: Ranking
    responses: list[str]
    purpose: CheckPurpose
    explanation: str


def defer_tasks(db: Database, import_id: int, prompt_ids: Iterable[str]) -> None:
    """Record that these prompts get a task when their import is finished."""
    rows = ([import_id, prompt_id] for prompt_id in prompt_ids)
    db.conn.executemany("INSERT INTO import_tasks (import_id, prompt_id) VALUES (?, ?)", rows)


def defer_link(db: Database, import_id: int, prompt_id: str) -> None:
    """Record that a prompt's judgments are linked to its task when their import is finished."""
    query = "INSERT INTO import_tasks (import_id, prompt_id, content) VALUES (?, ?, ?)"
    db.execute(query, [import_id, prompt_id, LINK])


def defer_check(db: Database, import_id: int, check: Check) -> None:
    """Record a gold or training task to make when its import is finished."""
    content = json.dumps(
        {
            "place": check.location,  # the name that databases have had
            "answer": check.answer.to_json(),
            "responses": check.responses,
            "purpose": check.purpose,
            "explanation": check.explanation,
        }
    )
    query = "INSERT INTO import_tasks (import_id, prompt_id, content) VALUES (?, ?, ?)"
    db.execute(query, [import_id, check.answer.prompt_id, content])


def make_deferred_tasks(connections: Connections) -> Checks:
    """Make the recorded tasks, in the order of the lines they come from.

    Checks that cannot be made stay recorded until the end: if this program is killed before it
    reports them, the next one finds them again.
    """
    num_made = 0
    refused: dict[int, str] = {}

    def forget(db: Database, seq: int) -> None:
        db.execute("DELETE FROM import_tasks WHERE seq = ?", [seq])

    def make(db: Database, row: tuple[int, str, str | None]) -> None:
        nonlocal num_made
        seq, prompt_id, content = row
        if content is None:
            queue_tasks(db, [prompt_id])
        elif content == LINK:
            link_judgments(db, prompt_id)
        else:
            try:
                num_made += _make_check(connections, content)
            except InputError as error:
                refused[seq] = error.problem
                return
        forget(db, seq)

    write_in_chunks(connections, _deferred(connections), make)
    write_in_chunks(connections, refused, forget)
    return Checks(made=num_made, refused=list(refused.values()))


def num_deferred(connections: Connections) -> int:
    """How many recorded tasks, checks and links are still to be made."""
    return int(connections.db.execute("SELECT COUNT(*) FROM import_tasks").fetchone()[0])


def _deferred(connections: Connections) -> Iterator[tuple[int, str, str | None]]:
    query = f"""SELECT seq, prompt_id, content FROM import_tasks WHERE seq > ? AND {VISIBLE}
                ORDER BY seq LIMIT {CHUNK_ROWS}"""
    last = 0
    while rows := connections.db.execute(query, [last]).fetchall():
        yield from rows
        last = rows[-1][0]


def _make_check(connections: Connections, content: str) -> bool:
    """Make a recorded check; False where the same one exists.

    Raises:
        InputError: it cannot be made; the message begins with the line it comes from.
    """
    stored = json.loads(content)
    location = stored.pop("place")
    stored["answer"] = Ranking.from_json(stored["answer"])
    try:
        return make_check(connections, **stored)
    except InputError as error:
        raise InputError(f"{location}: {error.problem}", error.remedy) from None


# ------------------------------------------------------------------------------ small transactions


def write_in_chunks(
    connections: Connections,
    items: Iterable[Item],
    write: Callable[[Database, Item], None],
    *,
    import_id: int = 0,
) -> None:
    """Write every item, in transactions so short that people on the board do not notice them.

    Items are read ahead, outside of the transactions: they may come from a file or a network.

    Args:
        connections: the database.
        items: what to write.
        write: writes one of them.
        import_id: the import whose rows they are, if any.

    Raises:
        InterruptedRunError: another program has rolled that import back.
    """
    remaining = iter(items)
    while waiting := deque(islice(remaining, READ_AHEAD)):
        while waiting:
            with _short_write(connections) as db:
                if import_id:
                    _require_unfinished(db, import_id)
                give_up = time.monotonic() + CHUNK_SECONDS
                while waiting and time.monotonic() < give_up:
                    write(db, waiting.popleft())


@contextmanager
def _short_write(connections: Connections) -> Iterator[Database]:
    """A transaction, then a pause of the same length in which others can write.

    SQLite does not queue waiting writers; they retry, every 100 ms at the longest. With the
    database free half of the time, 99 of 100 get in within a quarter of a second.
    """
    with connections.write() as db:
        began = time.monotonic()
        yield db
    time.sleep(time.monotonic() - began)
