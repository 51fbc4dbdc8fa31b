"""The file of a label database: whether it exists, is a label database, and is undamaged.

A file is checked before anything opens it for writing, so another program's database gets neither
a schema nor a journal.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from labeling_app.db.files.migrations import MIGRATION_SET, migrations
from labeling_app.db.files.schema import APPLICATION_ID
from rlhf.errors import InputError

SHOWN_TABLES = 3
TEMPORARY = {  # errors by locks, open files or memory, which say nothing about the file
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
}
GONE = "its file was removed or replaced since it was opened"

Identity = tuple[int, ...] | None


class LostDatabaseError(sqlite3.OperationalError):
    """Writes would be lost: the file was removed, replaced or damaged."""


@contextmanager
def open_read_only(path: Path, *, is_immutable: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write.

    Args:
        path: the file.
        is_immutable: read the main file alone, as it is, and leave nothing beside it.

    Raises:
        sqlite3.DatabaseError: there is no such file, or it is not a SQLite database.
    """
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if is_immutable else ''}"
    with closing(sqlite3.connect(address, uri=True, check_same_thread=False)) as connection:
        yield connection


def is_label_database(path: Path) -> bool:
    """Whether a file is a label database; False where it is missing, or has no table yet.

    Raises:
        InputError: it is another program's database, or a folder.
        sqlite3.DatabaseError: it is not a SQLite database.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder", f"Give a file: --db {path / 'labels.db'}")
    if not path.is_file():
        return False
    try:
        tables, ours = _tables_of(path, is_immutable=True)
    except sqlite3.DatabaseError:  # perhaps only because somebody writes to it just now
        tables, ours = _tables_of(path, is_immutable=False)
    log = _log_of(path)
    if not tables and log.is_file() and log.stat().st_size:  # the tables are in the log still
        tables, ours = _tables_of(path, is_immutable=False)
    if tables and not ours:
        names = ", ".join(sorted(tables)[:SHOWN_TABLES])
        raise InputError(
            f"{path} is a database of another program (its tables: {names}); it was left as it is",
            "Give --db the path of a database made by `rlhf import`, or of a new file.",
        )
    return bool(tables)


def require_label_database(path: Path) -> None:
    """Check that a file is a label database with something in it.

    Raises:
        InputError: it is missing, empty, another program's, or no database.
    """
    if not path.exists():
        raise no_database(path)
    if not _has_label_database(path):
        raise empty_database(path)


def refuse_other_files(path: Path) -> None:
    """Check that a path holds a label database, or that one can be created there.

    Raises:
        InputError: there is a folder, another program's database, or a file that is no database.
    """
    _has_label_database(path)


def _has_label_database(path: Path) -> bool:
    try:
        return is_label_database(path)
    except sqlite3.DatabaseError as error:
        raise unusable_database(path, error) from None


def no_database(path: Path) -> InputError:
    """The error where there is no file."""
    return InputError(
        f"No label database at {path}", f"Make one first: rlhf import prompts.jsonl --db {path}"
    )


def empty_database(path: Path) -> InputError:
    """The error where there is no prompt yet."""
    return InputError(f"{path} is empty", f"Begin with: rlhf import prompts.jsonl --db {path}")


def unusable_database(path: Path, error: Exception) -> InputError:
    """The error for a file that SQLite cannot use."""
    return InputError(
        f"{path} cannot be used as a label database ({error})",
        "Give --db the path of a database made by `rlhf import`, or of a new file.",
    )


def _tables_of(path: Path, *, is_immutable: bool) -> tuple[set[str], bool]:
    """The tables of a file, and whether they are ours."""
    with open_read_only(path, is_immutable=is_immutable) as db:
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        tables = {row[0] for row in db.execute(query)}
        if db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,):
            return tables, True
        record = migrations.migrations_table
        if record not in tables:
            return tables, False
        query = f"SELECT 1 FROM {record} WHERE migration_set = ?"
        return tables, db.execute(query, [MIGRATION_SET]).fetchone() is not None


def find_damage(path: Path) -> str:
    """The first damage that SQLite finds in a database's file; "" where it is intact.

    Reads all of it, through a connection of its own: an open one has pages in its memory.

    Raises:
        sqlite3.OperationalError: it cannot be read at the moment.
    """
    try:
        with open_read_only(path) as db:
            message: str = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if _is_temporary(error):
            raise
        return str(error)
    return "" if message == "ok" else " ".join(message.split())


def _is_temporary(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says nothing about the file itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in TEMPORARY


def read_board_id(path: Path) -> str:
    """The id of the database that is in the file now; "" where there is none.

    Raises:
        sqlite3.OperationalError: it cannot be read at the moment.
    """
    try:
        with open_read_only(path) as db:
            row = db.execute("SELECT value FROM settings WHERE name = 'board'").fetchone()
    except sqlite3.DatabaseError as error:
        if _is_temporary(error):
            raise
        return ""
    return str(row[0]) if row else ""


class FileWatch:
    """Notices when the file of an open database, or its log, was removed or replaced.

    SQLite itself would keep writing to the deleted file and report success.

    Args:
        path: the file, open and in use.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # SQLite keeps the log beside the file, not beside a link
        self._log = _log_of(self._path)
        self._file, self._file_log = _identity(self._path, with_size=True), _identity(self._log)

    def require_same(self) -> None:
        """Check that what is written still reaches the file.

        Raises:
            LostDatabaseError: it does not.
        """
        has_log = self._file_log is None or self._file_log == _identity(self._log)
        if self._file != _identity(self._path, with_size=True) or not has_log:
            raise LostDatabaseError(GONE)


def _identity(path: Path, *, with_size: bool = False) -> Identity:
    """Device and inode of a file, and whether anything is in it; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    size = (bool(status.st_size),) if with_size else ()
    return status.st_dev, status.st_ino, *size


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")
