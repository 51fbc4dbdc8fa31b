"""Tasks: one prompt and the responses to rank together.

Every row of `tasks` is made and changed here. `tasks.open` is how many more people a task wants,
`round_id` the round that chose it, and `reason` an explanation for people, which no code reads.
"""

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from sqlite_utils import Database

from labeling_app.db.connection import VISIBLE, Connections, dump, read_setting

Purpose = Literal["rank", "compare", "gold", "repeat", "training"]
CheckPurpose = Literal["gold", "training"]
KNOWN_ANSWER = "purpose IN ('gold', 'training')"
# Tasks that may be reordered: open to everybody, and not chosen by a round.
TO_PRIORITIZE = "open > 0 AND only_for IS NULL AND purpose = 'rank' AND round_id IS NULL"
EVERYBODY = 1_000_000


def default_overlap(db: Database) -> int:
    """How many people rank each new task."""
    return int(read_setting(db, "overlap") or 1)


def insert_task(
    db: Database,
    prompt_id: str,
    responses: Sequence[str],
    *,
    purpose: Purpose = "rank",
    overlap: int = 1,
    **columns: Any,
) -> int:
    """Make a task and return its number.

    Args:
        db: the database, inside a transaction.
        prompt_id: the prompt.
        responses: the ids of what is shown.
        purpose: what its rankings are for.
        overlap: how many people are to rank it.
        columns: further columns, such as `only_for`.
    """
    row = {
        "prompt_id": prompt_id,
        "responses": dump(responses),
        "purpose": purpose,
        "overlap": overlap,
        "open": overlap,
        "created_at": time.time(),
        **columns,
    }
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    cursor = db.execute(f"INSERT INTO tasks ({names}) VALUES ({marks})", list(row.values()))
    return int(cursor.lastrowid or 0)


def queue_tasks(db: Database, prompt_ids: Iterable[str]) -> None:
    """Make, or complete, the ranking task of prompts that got new responses.

    A task nobody has seen takes the new responses in; one that was seen, or that a round chose,
    stays as it is, and the prompt gets a further task with all its responses, but not a check's.
    """
    overlap = default_overlap(db)
    for prompt_id in prompt_ids:
        query = f"""SELECT id FROM responses WHERE prompt_id = ? AND {VISIBLE}
                    ORDER BY model, sample_index, seq"""
        ids = [row[0] for row in db.execute(query, [prompt_id])]
        check = f"SELECT 1 FROM tasks WHERE prompt_id = ? AND {KNOWN_ANSWER}"
        if len(ids) < 2 or db.execute(check, [prompt_id]).fetchone():
            continue
        unseen = db.execute(
            "SELECT id FROM tasks t WHERE prompt_id = ? AND purpose = 'rank'"
            " AND only_for IS NULL AND round_id IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM assignments a WHERE a.task_id = t.id)",
            [prompt_id],
        ).fetchone()
        if any(set(ids) == set(responses) for _, responses in tasks_to_rank(db, prompt_id)):
            continue  # asked for before, by a line of the same import
        if unseen:
            db.execute("UPDATE tasks SET responses = ? WHERE id = ?", [dump(ids), unseen[0]])
        else:
            insert_task(db, prompt_id, ids, overlap=overlap)


def make_known_answer(
    db: Database,
    prompt_id: str,
    responses: Sequence[str],
    purpose: CheckPurpose,
    answer: str,
    explanation: str,
) -> None:
    """Make a task with a known answer for everybody, in the place of the prompt's ranking tasks."""
    columns: dict[str, Any] = {
        "purpose": purpose,
        "answer": answer,
        "reason": explanation,
        "overlap": EVERYBODY,
        "open": EVERYBODY,
    }
    assignments = ", ".join(f"{name} = ?" for name in columns)
    cursor = db.execute(
        f"UPDATE tasks SET responses = ?, {assignments} WHERE prompt_id = ? AND purpose = 'rank'",
        [dump(responses), *columns.values(), prompt_id],
    )
    if not cursor.rowcount:
        insert_task(db, prompt_id, responses, **columns)


def adjudication_task(db: Database, task_id: int, lead: str) -> int | None:
    """The task in which a lead adjudicates another; made where there is none yet.

    None where there is nothing to adjudicate: no such task, one that adjudicates itself, or no
    ranking.
    """
    query = "SELECT id FROM tasks WHERE decides = ? AND only_for = ?"
    row = db.execute(query, [task_id, lead]).fetchone()
    if row is not None:
        return int(row[0])
    query = """SELECT prompt_id, responses, purpose FROM tasks t
               WHERE id = ? AND purpose IN ('rank', 'compare') AND decides IS NULL
               AND EXISTS (SELECT 1 FROM rankings r WHERE r.task_id = t.id)"""
    row = db.execute(query, [task_id]).fetchone()
    if row is None:
        return None
    prompt_id, responses, purpose = row
    return insert_task(
        db, prompt_id, json.loads(responses), purpose=purpose, decides=task_id, only_for=lead
    )


# ------------------------------------------------------------------------- how many people it wants


def change_open(db: Database, task_id: int, by: int) -> None:
    """Change how many more people a task wants."""
    db.execute("UPDATE tasks SET open = open + ? WHERE id = ?", [by, task_id])


def want_one_more(db: Database, task_id: int) -> None:
    """Ask for one person beyond the overlap, at most once per task."""
    db.execute("UPDATE tasks SET extra = 1, open = open + 1 WHERE id = ?", [task_id])


def change_overlap(db: Database, overlap: int) -> None:
    """Set how many people rank each ordinary task that exists."""
    db.execute(
        "UPDATE tasks SET open = open + :n - overlap, overlap = :n"
        " WHERE overlap <> :n AND purpose = 'rank' AND only_for IS NULL",
        {"n": overlap},
    )


def finished_without_extra(db: Database) -> list[int]:
    """Finished tasks of several people for which no extra person was asked."""
    query = "SELECT id FROM tasks WHERE overlap > 1 AND open <= 0 AND extra = 0"
    return [row[0] for row in db.execute(query).fetchall()]


def reserve_tasks(db: Database, source: str, *, is_reserved: bool) -> None:
    """Keep the tasks of a source for the people it was given to, or let everybody get them."""
    query = """UPDATE tasks SET reserved = ?
               WHERE prompt_id IN (SELECT id FROM prompts WHERE source = ?)"""
    db.execute(query, [source if is_reserved else None, source])


# ------------------------------------------------------------------------------ order of the queue


def open_tasks(connections: Connections) -> list[tuple[int, str, list[str]]]:
    """(task, prompt, response ids) of the tasks that `set_priorities` may put in order."""
    query = f"SELECT id, prompt_id, responses FROM tasks WHERE {TO_PRIORITIZE}"
    rows = connections.db.execute(query).fetchall()
    return [(task_id, prompt_id, json.loads(ids)) for task_id, prompt_id, ids in rows]


def set_priorities(connections: Connections, order: Sequence[tuple[int, str]]) -> None:
    """Put tasks, each with its reason, in this order; other such tasks come after them."""
    with connections.write() as db:
        db.execute(f"UPDATE tasks SET priority = 0, reason = '' WHERE {TO_PRIORITIZE}")
        rows = [(len(order) - index, why, id_) for index, (id_, why) in enumerate(order)]
        db.conn.executemany("UPDATE tasks SET priority = ?, reason = ? WHERE id = ?", rows)


def waiting_tasks(db: Database) -> list[int]:
    """The tasks that still want people, in the order of the queue."""
    query = "SELECT id FROM tasks WHERE open > 0 ORDER BY priority DESC, id"
    return [row[0] for row in db.execute(query)]


def set_order(db: Database, task_ids: Sequence[int]) -> None:
    """Give tasks priorities so that they come in this order."""
    rows = enumerate(reversed(task_ids), start=1)
    db.conn.executemany("UPDATE tasks SET priority = ? WHERE id = ?", rows)


def highest_priority(db: Database) -> float:
    """The priority of what comes first; 0 where there is no task."""
    return float(db.execute("SELECT COALESCE(MAX(priority), 0) FROM tasks").fetchone()[0])


# --------------------------------------------------------------------------------- what there is


def tasks_to_rank(db: Database, prompt_id: str) -> list[tuple[int, list[str]]]:
    """(task, response ids) of the prompt's tasks in which anybody may rank, done or not."""
    query = """SELECT id, responses FROM tasks
               WHERE prompt_id = ? AND purpose = 'rank' AND only_for IS NULL"""
    return [(task_id, json.loads(ids)) for task_id, ids in db.execute(query, [prompt_id])]


def comparison_task(db: Database, prompt_id: str, responses: Sequence[str]) -> int | None:
    """The task by which an evaluation has asked for these responses, in this order, if any has."""
    query = """SELECT id, responses FROM tasks
               WHERE prompt_id = ? AND purpose = 'compare' AND decides IS NULL ORDER BY id"""
    rows = db.execute(query, [prompt_id])
    return next((id_ for id_, ids in rows if json.loads(ids) == list(responses)), None)


def num_people_wanted(db: Database, task_ids: Sequence[int]) -> int:
    """How many people are asked about these tasks, taken together."""
    query = """SELECT COALESCE(SUM(t.overlap + t.extra), 0) FROM json_each(?) task
               CROSS JOIN tasks t ON t.id = task.value"""
    return int(db.execute(query, [dump(task_ids)]).fetchone()[0])


def is_chosen(db: Database, prompt_id: str, responses: Sequence[str]) -> bool:
    """Whether a round, an evaluation or a check has chosen these responses before."""
    chosen = f"(round_id IS NOT NULL OR purpose = 'compare' OR {KNOWN_ANSWER})"
    return _has_task(db, prompt_id, responses, chosen)


def _has_task(db: Database, prompt_id: str, responses: Sequence[str], which: str) -> bool:
    query = f"SELECT responses FROM tasks WHERE prompt_id = ? AND {which}"
    return list(responses) in [json.loads(row[0]) for row in db.execute(query, [prompt_id])]
