"""One SQLite file, many threads: a connection per thread and one writer at a time.

Every read-then-write runs inside `write()`: a process-wide lock and BEGIN IMMEDIATE, so that two
threads never read the same state and overwrite each other. sqlite-utils' own `atomic()` begins
deferred, which under WAL ends in "database is locked" as soon as two such transactions meet; inside
`write()` it becomes a savepoint and is safe.
"""

import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_utils import Database

from labeling_app.migrations import migrations
from labeling_app.private_files import make_private
from rlhf.diagnose import diagnose
from rlhf.errors import InputError

BUSY_TIMEOUT_SECONDS = 60.0
# Rows of an import that is under way are there and not to be seen; `unfinished.py` says more.
UNFINISHED = "(SELECT id FROM imports WHERE finished_at IS NULL)"
SHOWN = f"import_id NOT IN {UNFINISHED}"


class Connections:
    """The connections of this process to one label database, brought to the newest schema.

    Args:
        path: the database file; created with its folder when it does not exist.

    Raises:
        InputError: the file is not a SQLite database, or cannot be made.
        InterruptedRunError: another program is writing to it for longer than a minute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._open: weakref.WeakSet[Database] = weakref.WeakSet()
        self._write_lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_private(path)
            _choose_wal(self.db)
            if migrations.pending(self.db):  # or readers would wait for whoever writes
                with self.write() as db:
                    migrations.apply(db)
        except (sqlite3.DatabaseError, OSError) as error:
            self.close()
            if busy := diagnose(error):
                raise busy from None
            raise InputError(
                f"{path} cannot be used as a label database ({error})",
                "Give --db the path of a database made by `rlhf import`, or of a new file.",
            ) from None

    @property
    def db(self) -> Database:
        """The connection of the current thread."""
        database: Database | None = getattr(self._local, "db", None)
        if database is None:
            database = self._local.db = self._connect()
        return database

    def _connect(self) -> Database:
        # Worker threads come and go; close() runs in another thread than the one that opened.
        connection = sqlite3.connect(
            self.path,
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
        """A transaction that sees no other writer between its reads and its writes; it nests."""
        with self._write_lock:
            db = self.db
            if db.conn.in_transaction:
                yield db
                return
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


def _choose_wal(db: Database) -> None:
    """Keep the journal beside the file; SQLite does not wait here where two open a new one."""
    give_up = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.01)
