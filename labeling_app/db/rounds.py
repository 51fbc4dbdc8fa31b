"""Rounds of labeling: for each, the policy that was sampled and with what."""

import json
from typing import Any

from sqlite_utils import Database

from labeling_app.db.connection import Connections, dump


def ensure_round(db: Database, policy: str, content: dict[str, Any]) -> int:
    """The number of the round that sampled a policy; a new one is stored with its content.

    Args:
        db: the database, inside a transaction.
        policy: hash of the policy.
        content: paths, hashes and settings, as JSON values.
    """
    row = db.execute("SELECT id FROM rounds WHERE policy = ?", [policy]).fetchone()
    if row is None:
        query = "INSERT INTO rounds (policy, content) VALUES (?, ?) RETURNING id"
        row = db.execute(query, [policy, dump(content)]).fetchone()
    return int(row[0])


def rounds(connections: Connections) -> dict[int, dict[str, Any]]:
    """By number, the inputs and settings of each round."""
    rows = connections.db.execute("SELECT id, content FROM rounds ORDER BY id")
    return {number: json.loads(content) for number, content in rows}


def tasks_of_round(connections: Connections, number: int) -> list[int]:
    """The tasks that a round has put on the board. No index has them: this reads all tasks."""
    rows = connections.db.execute("SELECT id FROM tasks WHERE round_id = ?", [number])
    return [row[0] for row in rows]
