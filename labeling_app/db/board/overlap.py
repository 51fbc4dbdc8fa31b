"""How many people rank a task: the same for all tasks, and one more if those asked disagree."""

import json
from itertools import combinations
from statistics import fmean

from sqlite_utils import Database

from labeling_app.db.connection import Connections, read_setting, write_setting
from labeling_app.db.tasks import (
    change_overlap,
    default_overlap,
    finished_without_extra,
    want_one_more,
)
from labeling_app.rankings.agreement import pair_agreement
from rlhf.errors import InputError


def set_overlap(connections: Connections, overlap: int) -> None:
    """Let `overlap` people rank each task, those already queued included."""
    with connections.write() as db:
        write_setting(db, "overlap", overlap)
        change_overlap(db, overlap)


def set_another_below(connections: Connections, share: float) -> None:
    """Ask one more person about tasks whose annotators agree on less than this share of pairs.

    Tasks that are finished already are looked at too. 0 asks nobody from now on.

    Raises:
        InputError: only one person ranks each task, so there is nothing to compare.
    """
    with connections.write() as db:
        if share and default_overlap(db) < 2:
            raise InputError(
                f"--another-below is {share:g}, but one person ranks each task",
                "Let two people rank each task: --overlap 2",
            )
        write_setting(db, "another_below", share)
        for task_id in finished_without_extra(db):
            ask_another(db, task_id)


def ask_another(db: Database, task_id: int) -> None:
    """Ask one more person, once, if all who were asked have ranked a task and disagree."""
    wanted = float(read_setting(db, "another_below") or 0)
    if not wanted:
        return
    query = """SELECT r.tiers, t.overlap FROM tasks t JOIN rankings r ON r.task_id = t.id
               WHERE t.id = ? AND t.overlap > 1 AND t.extra = 0 AND r.live = 1"""
    rows = db.execute(query, [task_id]).fetchall()
    if not rows or len(rows) < rows[0][1]:
        return
    pairs = combinations([json.loads(tiers) for tiers, _ in rows], 2)
    agreements = [value for a, b in pairs if (value := pair_agreement(a, b)) is not None]
    if agreements and fmean(agreements) < wanted:
        want_one_more(db, task_id)


def num_open(connections: Connections) -> int:
    """How many tasks for everybody are not done yet: they wait or are on somebody's screen."""
    db = connections.db
    [waiting] = db.execute("SELECT value FROM totals WHERE name = 'open'").fetchone()
    query = """SELECT a.task_id FROM assignments a JOIN tasks t ON t.id = a.task_id
               WHERE a.state = 'leased' AND a.expires_at > 0 AND t.open <= 0
               AND t.purpose IN ('rank', 'compare') AND t.only_for IS NULL"""
    return int(waiting) + len({row[0] for row in db.execute(query)})


def num_for_everybody(connections: Connections) -> int:
    """How many tasks are for everybody, done or not: no checks, and no decisions of a lead."""
    query = """SELECT (SELECT value FROM totals WHERE name = 'tasks')
        - (SELECT COUNT(*) FROM tasks WHERE purpose IN ('gold', 'training', 'repeat'))
        - (SELECT COUNT(*) FROM tasks WHERE decides IS NOT NULL)"""
    [[number]] = connections.db.execute(query).fetchall()
    return int(number)


def num_wanted(connections: Connections) -> int:
    """How many rankings the open tasks still want from people; votes on pairs are none."""
    query = """SELECT
        (SELECT COALESCE(SUM(open), 0) FROM tasks WHERE open > 0 AND only_for IS NULL
         AND purpose = 'rank') +
        (SELECT COUNT(*) FROM assignments a JOIN tasks t ON t.id = a.task_id
         WHERE a.state = 'leased' AND a.expires_at > 0
         AND t.purpose = 'rank' AND t.only_for IS NULL)"""
    return int(connections.db.execute(query).fetchone()[0])
