"""Tasks: what stands in the queue for people to rank."""

import json
import time
from collections.abc import Iterable

from sqlite_utils import Database

from labeling_app.db.connection import SHOWN
from labeling_app.db.overlap import default_overlap


def queue_tasks(db: Database, prompt_ids: Iterable[str]) -> None:
    """Make, or complete, the ranking task of prompts that got new responses.

    A task nobody has seen takes the new responses in; one that was seen, or that a round chose,
    stays as it is, and the prompt gets a further task with all its responses, but not a check's.
    """
    overlap = default_overlap(db)
    for prompt_id in prompt_ids:
        query = f"""SELECT id FROM responses WHERE prompt_id = ? AND {SHOWN}
                    ORDER BY model, sample_index, seq"""
        found = [row[0] for row in db.execute(query, [prompt_id])]
        ids = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        check = "SELECT 1 FROM tasks WHERE prompt_id = ? AND purpose IN ('gold', 'training')"
        if len(found) < 2 or db.execute(check, [prompt_id]).fetchone():
            continue
        untouched = db.execute(
            "SELECT id FROM tasks t WHERE prompt_id = ? AND purpose = 'rank'"
            " AND only_for IS NULL AND reason NOT LIKE 'round %'"
            " AND NOT EXISTS (SELECT 1 FROM assignments a WHERE a.task_id = t.id)",
            [prompt_id],
        ).fetchone()
        if untouched:
            db.execute("UPDATE tasks SET responses = ? WHERE id = ?", [ids, untouched[0]])
        else:
            db.execute(
                "INSERT INTO tasks (prompt_id, responses, overlap, open, created_at)"
                " VALUES (?, ?, ?, ?, ?)",
                [prompt_id, ids, overlap, overlap, time.time()],
            )


def put_off_tasks(db: Database, import_id: int, prompt_ids: Iterable[str]) -> None:
    """Note that these prompts get a task when their import is whole."""
    rows = ([import_id, prompt_id] for prompt_id in prompt_ids)
    db.conn.executemany("INSERT INTO import_tasks (import_id, prompt_id) VALUES (?, ?)", rows)
