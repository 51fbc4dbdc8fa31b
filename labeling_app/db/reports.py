"""Queries for what people are shown of the database: history, the dashboard, decisions."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from labeling_app.db.connection import Connections
from labeling_app.db.rankings import TURN, TURNS_ONCE

Row = dict[str, Any]


def recent_rows(connections: Connections, annotator: str, limit: int) -> list[Row]:
    """An annotator's latest rankings and skips on the board, newest first.

    Each has task_id, created_at, messages of the prompt, tiers, shown and flags (None where
    skipped), and reason (of a skip).
    """
    query = """
        SELECT work.task_id, work.created_at, p.messages, work.tiers, work.shown, work.flags,
            work.reason
        FROM (
            SELECT task_id, created_at, tiers, shown, flags, '' AS reason FROM rankings
            WHERE annotator = :me AND live = 1 AND task_id IS NOT NULL AND shown IS NOT NULL
            UNION ALL
            SELECT s.task_id, s.created_at, NULL, NULL, NULL, s.reason FROM skips s
            JOIN assignments a ON a.task_id = s.task_id AND a.annotator = s.annotator
            WHERE s.annotator = :me AND a.state = 'skipped') work
        JOIN tasks t ON t.id = work.task_id JOIN prompts p ON p.id = t.prompt_id
        ORDER BY 2 DESC LIMIT :limit"""
    return list(connections.db.query(query, {"me": annotator, "limit": limit}))


def num_made_since(connections: Connections, began: float) -> int:
    """How many live rankings people have made in the app since then (seconds since 1970).

    What they say of one question of live mode counts once.
    """
    query = f"""SELECT {TURNS_ONCE} FROM (SELECT {TURN} AS turn FROM rankings r
                WHERE live = 1 AND shown IS NOT NULL AND created_at >= ?)"""
    return int(connections.db.execute(query, [began]).fetchone()[0])


def votes_on_turns(connections: Connections, limit: int) -> list[tuple[str, str, str, str]]:
    """(question, annotator, tiers, flags) of every vote on the latest questions of live mode."""
    query = """
        SELECT l.id, l.annotator, r.tiers, r.flags
        FROM (SELECT * FROM live_turns ORDER BY created_at DESC LIMIT ?) l
        JOIN rankings r INDEXED BY rankings_of_prompt
            ON r.prompt_id = l.prompt_id AND r.annotator = l.annotator AND r.live = 1
            AND r.task_id IS NULL AND r.shown IS NOT NULL
            AND EXISTS (SELECT 1 FROM json_each(l.shown) s WHERE INSTR(r.tiers, s.value))"""
    return list(connections.db.execute(query, [limit]))


def latest_rankings(connections: Connections, limit: int) -> list[Row]:
    """The latest live rankings that people made of tasks, newest first, decisions aside.

    Each has task_id, prompt_id, annotator, tiers, flags, shown and duration_ms (None where an
    imported judgment does not say it), created_at, messages of the prompt, responses of the task,
    and lengths: the characters of every response, by id.
    """
    query = """
        SELECT r.task_id, r.prompt_id, r.annotator, r.tiers, r.flags, r.shown, r.duration_ms,
            r.created_at, p.messages, t.responses,
            (SELECT json_group_object(s.id, LENGTH(s.text)) FROM json_each(t.responses) j
             JOIN responses s ON s.id = j.value) AS lengths
        FROM rankings r JOIN annotators a ON a.name = r.annotator AND a.kind = 'human'
        JOIN prompts p ON p.id = r.prompt_id
        JOIN tasks t ON t.id = r.task_id AND t.purpose IN ('rank', 'compare')
            AND t.decides IS NULL
        WHERE r.live = 1 ORDER BY r.seq DESC LIMIT ?"""
    return list(connections.db.query(query, [limit]))


def response_texts(connections: Connections, ids: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(id, text) of these responses, one after the other."""
    query = """SELECT r.id, r.text FROM json_each(?) wanted
               JOIN responses r ON r.id = wanted.value"""
    yield from connections.db.execute(query, [json.dumps(list(ids))])


def next_tasks(connections: Connections, limit: int) -> list[tuple[str, str]]:
    """(messages of the prompt, reason) of what everybody gets next, where it has a reason."""
    query = """
        SELECT p.messages, t.reason FROM (
            SELECT prompt_id, reason, priority, id FROM tasks
            WHERE open > 0 AND only_for IS NULL AND purpose IN ('rank', 'compare')
            AND reserved IS NULL ORDER BY priority DESC, id LIMIT ?) t
        JOIN prompts p ON p.id = t.prompt_id WHERE t.reason <> ''
        ORDER BY t.priority DESC, t.id"""
    return list(connections.db.execute(query, [limit]))


def rankings_of_task(connections: Connections, task_id: int | None) -> list[tuple[str, str, str]]:
    """(tiers, flags, note) of a task's live rankings, in an order that names nobody."""
    query = """SELECT tiers, flags, note FROM rankings
               WHERE task_id = ? AND live = 1 ORDER BY id"""
    return list(connections.db.execute(query, [task_id]))


def latest_adjudications(
    connections: Connections, task_ids: Sequence[int]
) -> dict[int, tuple[str, str]]:
    """The tiers and flags, as JSON, that the latest adjudication gave each of these tasks."""
    query = """SELECT d.decides, r.tiers, r.flags FROM json_each(?) wanted
               JOIN tasks d ON d.decides = wanted.value
               JOIN rankings r ON r.task_id = d.id AND r.live = 1 ORDER BY r.seq"""
    rows = connections.db.execute(query, [json.dumps(list(task_ids))])
    return {task_id: (tiers, flags) for task_id, tiers, flags in rows}


def length_limits(connections: Connections, ids: Sequence[str]) -> dict[str, int | None]:
    """Those of the responses that were cut off, with the limit in tokens where it is known."""
    query = f"""SELECT id, json_extract(sampling, '$.max_new_tokens') FROM responses
                WHERE finished = 0 AND id IN ({", ".join("?" * len(ids))})"""
    return dict(connections.db.execute(query, list(ids)).fetchall())
