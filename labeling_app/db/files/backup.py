"""A copy of the label database as of one moment, made while people label."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from labeling_app.db.files.label_file import open_read_only, require_label_database
from labeling_app.db.files.private_files import make_private
from rlhf.errors import InputError


def back_up(db: Path, out: Path) -> dict[str, int]:
    """Copy the database into one new file and check the copy. Returns its counts.

    All pages are copied in one step, which reads one snapshot: with steps in between, every
    submission of an annotator would start the copy anew.

    Raises:
        InputError: no database, `out` exists, or the copy cannot be written or is not whole.
    """
    require_label_database(db)
    if out.is_dir():
        raise InputError(f"{out} is a folder", f"Give a file: --out {out / db.name}")
    if out.exists():
        raise InputError(f"{out} already exists", "Choose another --out; backups never overwrite.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        make_private(partial)
        with open_read_only(db) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
            # A single file, without -wal and -shm beside it.
            copy.execute("PRAGMA journal_mode = DELETE")
            problems = [row[0] for row in copy.execute("PRAGMA integrity_check")]
            counts: dict[str, int] = dict(copy.execute("SELECT name, value FROM totals"))
    except (sqlite3.OperationalError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"The copy could not be written to {out} ({error})",
            f"Check that {out.parent} has room: df -h {out.parent}",
        ) from None
    if problems != ["ok"]:
        partial.unlink()
        raise InputError(f"{db} is damaged ({problems[0]})", "Use an earlier backup.")
    _move_durably(partial, out)
    return counts


def _move_durably(partial: Path, out: Path) -> None:
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.rename(out)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
