"""How many people rank a task: the same for all tasks, and one more where those asked differ."""

import json
from itertools import combinations
from statistics import fmean

from sqlite_utils import Database

from labeling_app.db.connection import Connections
from labeling_app.rankings.agreement import pair_agreement
from rlhf.errors import InputError


def default_overlap(db: Database) -> int:
    """How many people rank each new task."""
    return int(_setting(db, "overlap", 1))


def set_overlap(connections: Connections, overlap: int) -> None:
    """Let `overlap` people rank each task, those already queued included."""
    with connections.write() as db:
        db.execute("INSERT OR REPLACE INTO settings VALUES ('overlap', ?)", [str(overlap)])
        db.execute(
            "UPDATE tasks SET open = open + :n - overlap, overlap = :n"
            " WHERE overlap <> :n AND purpose = 'rank' AND only_for IS NULL",
            {"n": overlap},
        )


def set_another_below(connections: Connections, share: float) -> None:
    """Ask one more person wherever those asked agree on less than this share of pairs.

    Tasks that are finished already are looked at too. 0 asks nobody from now on.

    Raises:
        InputError: only one person ranks each task, so there is nothing to compare.
    """
    with connections.write() as db:
        if share and default_overlap(db) < 2:
            raise InputError(
                f"--another-below is {share:g}, but one person ranks each task",
                "Let two compare: --overlap 2",
            )
        db.execute("INSERT OR REPLACE INTO settings VALUES ('another_below', ?)", [str(share)])
        query = "SELECT id FROM tasks WHERE overlap > 1 AND open = 0 AND extra = 0"
        for (task_id,) in db.execute(query).fetchall():
            ask_another(db, task_id)


def ask_another(db: Database, task_id: int) -> None:
    """Want one more person, once, for a task that all asked have ranked and differ on."""
    wanted = _setting(db, "another_below", 0.0)
    if not wanted:
        return
    query = """SELECT r.tiers, t.overlap FROM tasks t JOIN rankings r ON r.task_id = t.id
               WHERE t.id = ? AND t.overlap > 1 AND t.extra = 0 AND r.live = 1"""
    rows = db.execute(query, [task_id]).fetchall()
    if not rows or len(rows) < rows[0][1]:
        return
    pairs = combinations([json.loads(tiers) for tiers, _ in rows], 2)
    found = [value for a, b in pairs if (value := pair_agreement(a, b)) is not None]
    if found and fmean(found) < wanted:
        db.execute("UPDATE tasks SET extra = 1, open = open + 1 WHERE id = ?", [task_id])


def num_open(connections: Connections) -> int:
    """How many tasks for everybody are not done yet: they wait or are on somebody's screen."""
    db = connections.db
    [waiting] = db.execute("SELECT value FROM totals WHERE name = 'open'").fetchone()
    query = """SELECT a.task_id FROM assignments a JOIN tasks t ON t.id = a.task_id
               WHERE a.state = 'leased' AND a.expires_at > 0 AND t.open = 0
               AND t.purpose IN ('rank', 'compare') AND t.only_for IS NULL"""
    return int(waiting) + len({row[0] for row in db.execute(query)})


def _setting(db: Database, name: str, default: float) -> float:
    row = db.execute("SELECT value FROM settings WHERE name = ?", [name]).fetchone()
    return float(row[0]) if row else default
