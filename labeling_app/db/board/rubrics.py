"""The rubric that the board shows, and every version it has shown."""

import time
from typing import NamedTuple

from sqlite_utils import Database

from labeling_app.db.connection import Connections
from rlhf.records.fingerprints import text_hash

LISTED = 50


class RubricVersion(NamedTuple):
    """A rubric as it was saved.

    Args:
        version: a hash of the text, which rankings keep; "" for no text.
        text: markdown.
        saved_at: seconds since 1970.
        saved_by: a lead; "" where a file was given at the start of the server.
    """

    version: str
    text: str
    saved_at: float
    saved_by: str


def save_rubric(connections: Connections, text: str, saved_by: str) -> bool:
    """Let the board show this text from now on; False where it does already."""
    version = text_hash(text) if text else ""
    with connections.write() as db:
        if current_version(db) == version:
            return False
        now = time.time()
        db.execute("INSERT OR IGNORE INTO rubrics VALUES (?, ?, ?)", [version, text, now])
        query = "INSERT INTO board_rubrics (version, saved_at, saved_by) VALUES (?, ?, ?)"
        db.execute(query, [version, now, saved_by])
    return True


def save_rubric_file(connections: Connections, text: str) -> None:
    """Show the rubric of a file, unless it was given before and a lead has changed it since."""
    query = "SELECT version FROM board_rubrics WHERE saved_by = '' ORDER BY seq DESC LIMIT 1"
    with connections.write() as db:
        last = db.execute(query).fetchone()
        if last is None or last[0] != text_hash(text):
            save_rubric(connections, text, "")


def current_version(db: Database) -> str:
    """The version that the board shows; "" where it shows none."""
    query = """SELECT version FROM board_rubrics
               WHERE seq = (SELECT MAX(seq) FROM board_rubrics)"""
    row = db.execute(query).fetchone()
    return str(row[0]) if row else ""


def rubric_text(db: Database, version: str) -> str:
    """The text of a version; "" where there is none."""
    row = db.execute("SELECT text FROM rubrics WHERE version = ?", [version]).fetchone()
    return str(row[0]) if row else ""


def rubric_versions(connections: Connections) -> list[RubricVersion]:
    """The latest versions that the board has shown, newest first."""
    query = """SELECT b.version, r.text, b.saved_at, b.saved_by FROM board_rubrics b
               JOIN rubrics r ON r.version = b.version ORDER BY b.seq DESC LIMIT ?"""
    return [RubricVersion(*row) for row in connections.db.execute(query, [LISTED])]
