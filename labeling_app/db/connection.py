"""One SQLite file, many threads: a connection per thread and one writer at a time.

Every read-then-write runs inside `write()`: a process-wide lock and BEGIN IMMEDIATE, so that two
threads never read the same state and overwrite each other. sqlite-utils' own `atomic()` begins
deferred, which under WAL ends in "database is locked" as soon as two such transactions meet; inside
`write()` it becomes a savepoint and is safe.
"""

import json
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlite_utils import Database

from labeling_app.db.files.label_file import (
    FileWatch,
    LostDatabaseError,
    is_label_database,
    open_read_only,
    require_label_database,
    unusable_database,
)
from labeling_app.db.files.migrations import migrations
from labeling_app.db.files.private_files import make_private
from rlhf.diagnose import diagnose

BUSY_TIMEOUT_SECONDS = 60.0
# Rows of an unfinished import are stored but hidden: see imports/unfinished.py.
UNFINISHED = "(SELECT id FROM imports WHERE finished_at IS NULL)"
VISIBLE = f"import_id NOT IN {UNFINISHED}"


class Connections:
    """The connections of this process to one label database, brought to the newest schema.

    Args:
        path: the database file; created with its folder when it does not exist.
        read_only: leave the file as it is; one of an older schema is read from a copy that is
            brought to the newest.

    Raises:
        InputError: the file is not a label database, cannot be made, or is empty (`read_only`).
        InterruptedRunError: another program is writing to it for longer than a minute.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.damage = ""  # what a check of the whole file found
        self._file, self._is_writable = path, not read_only
        self._copy: TemporaryDirectory[str] | None = None
        self._watch: FileWatch | None = None
        self._local = threading.local()
        self._open: weakref.WeakSet[Database] = weakref.WeakSet()
        self._write_lock = threading.RLock()
        try:
            if read_only:
                require_label_database(path)
                self._open_read_only()
            else:
                is_label_database(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                make_private(path)
                self._bring_up_to_date()
        except (sqlite3.DatabaseError, OSError) as error:
            self.close()
            if busy := diagnose(error):
                raise busy from None
            raise unusable_database(path, error) from None
        # Kept open: SQLite removes its log with the last connection, which the watch would report.
        self._first = self.db
        self._watch = FileWatch(self._file)

    def _bring_up_to_date(self) -> None:
        _choose_wal(self.db)
        if migrations.pending(self.db):  # or readers would wait for whoever writes
            with self._transaction() as db:
                migrations.apply(db)

    def _open_read_only(self) -> None:
        if not migrations.pending(self.db):
            return
        self.close()
        # A program of the older version may be using the file, so it is left as it is.
        self._copy = TemporaryDirectory(prefix="rlhf-")
        self._file, self._is_writable = Path(self._copy.name) / "copy.db", True
        with (
            open_read_only(self.path) as source,
            closing(sqlite3.connect(self._file)) as copy,
        ):
            source.backup(copy)
        self._bring_up_to_date()

    @property
    def db(self) -> Database:
        """The connection of the current thread."""
        database: Database | None = getattr(self._local, "db", None)
        if database is None:
            database = self._local.db = self._connect()
        return database

    def _connect(self) -> Database:
        mode = "rwc" if self._is_writable else "ro"
        if self._watch is not None:  # or this would create a new file where the old one is gone
            self._watch.require_same()
            mode = mode.removesuffix("c")
        # Worker threads come and go; close() runs in another thread than the one that opened.
        connection = sqlite3.connect(
            f"{self._file.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        database = Database(connection)
        self._open.add(database)
        return database

    @contextmanager
    def write(self) -> Iterator[Database]:
        """A transaction that sees no other writer between its reads and its writes; it nests.

        Raises:
            LostDatabaseError: the file is gone, another one or damaged; nothing may be taken as
                stored.
        """
        if self.db.conn.in_transaction:
            yield self.db
            return
        self.require_whole()
        with self._transaction() as db:
            yield db
        self.require_whole()

    def require_whole(self) -> None:
        """Check that the file is the one that was opened, and that no damage was found in it.

        Raises:
            LostDatabaseError: it is not.
        """
        if self._watch is not None:
            self._watch.require_same()
        if self.damage:
            raise LostDatabaseError(self.damage)

    @contextmanager
    def _transaction(self) -> Iterator[Database]:
        with self._write_lock:
            db = self.db
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # A full disk can end the transaction by itself; rolling back twice would hide why.
                if db.conn.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[Database]:
        """A connection of its own that sees one moment of the database however long it reads."""
        db = self._connect()
        try:
            db.execute("BEGIN")
            yield db
        finally:
            db.close()

    def close(self) -> None:
        """Close the connections of all threads."""
        for database in list(self._open):
            database.close()
        self._local = threading.local()
        if self._copy is not None:
            self._copy.cleanup()


def _choose_wal(db: Database) -> None:
    """Use write-ahead logging; SQLite does not wait here if two programs open a new file."""
    give_up = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def read_setting(db: Database, name: str) -> str | None:
    """A value that belongs to the database as a whole; None where it was never set."""
    row = db.execute("SELECT value FROM settings WHERE name = ?", [name]).fetchone()
    return str(row[0]) if row else None


def write_setting(db: Database, name: str, value: Any) -> None:
    """Set it, in place of what it was."""
    db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", [name, str(value)])


def dump(value: Any) -> str:
    """A value as the JSON of a column."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
