"""Rounds of labelling: samples of the newest policy into the queue, and where a ranking came from.

A round is known by the policy that was sampled; what no round has brought is of round 0. Rounds
stand in the settings table, one JSON object each.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from sqlite_utils import Database

from labeling_app.db.connection import SHOWN
from labeling_app.db.overlap import default_overlap
from labeling_app.db.store import Store
from rlhf.errors import InputError
from rlhf.records.schema import Prompt, Response

Chosen = tuple[Prompt, Sequence[Response], str]
PREFIX = "round "


def queue_round(
    store: Store,
    inputs: dict[str, dict[str, str]],
    chosen: Sequence[Chosen],
    settings: dict[str, Any],
) -> dict[str, int]:
    """Queue the chosen prompts, before all that waits, and note which policy this round sampled.

    Running again with the same policy adds to its round only what is new; what is kept of the round
    stays as it was.

    Args:
        store: the database.
        inputs: path and hash of the policy that was sampled, of the reward model and the reference.
        chosen: a prompt, the responses to rank, and why it was chosen; the best first.
        settings: how they were sampled and chosen; kept with the round.

    Returns:
        The round's number and how many prompts are newly queued.
    """
    with store.connections.write() as db:
        known = rounds(store)
        policy = inputs["policy"]["hash"]
        number = next(
            (n for n, r in known.items() if r["policy"]["hash"] == policy), len(known) + 1
        )
        content = json.dumps({**inputs, "settings": settings, "at": time.time()})
        db.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", [f"{PREFIX}{number}", content])
        store.add_prompts(prompt for prompt, _, _ in chosen)
        store.add_responses((r for _, responses, _ in chosen for r in responses), queue=False)
        top = float(db.execute("SELECT COALESCE(MAX(priority), 0) FROM tasks").fetchone()[0])
        queued = 0
        for place, (prompt, responses, reason) in enumerate(chosen):
            priority = top + len(chosen) - place
            queued += _queue(db, prompt, responses, priority, f"{PREFIX}{number}: {reason}")
    return {"round": number, "queued": queued}


def _queue(
    db: Database, prompt: Prompt, responses: Sequence[Response], priority: float, reason: str
) -> bool:
    ids = json.dumps([response.id for response in responses])
    query = "SELECT 1 FROM tasks WHERE prompt_id = ? AND responses = ?"
    if db.execute(query, [prompt.id, ids]).fetchone():
        return False
    overlap = default_overlap(db)
    db.execute(
        "INSERT INTO tasks (prompt_id, responses, overlap, open, priority, reason, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        [prompt.id, ids, overlap, overlap, priority, reason, time.time()],
    )
    return True


def rounds(store: Store) -> dict[int, dict[str, Any]]:
    """By number, what each round sampled and with what: as `queue_round` was told."""
    query = "SELECT name, value FROM settings WHERE name LIKE ?"
    rows = store.connections.db.execute(query, [f"{PREFIX}%"])
    found = {int(name.removeprefix(PREFIX)): json.loads(value) for name, value in rows}
    return dict(sorted(found.items()))


def trace(store: Store, ranking_id: str) -> dict[str, Any]:
    """Where a ranking came from: annotator, rubric, and of every response its model and round.

    Raises:
        InputError: there is no such ranking.
    """
    query = f"""
        SELECT r.*, a.kind, t.reason, b.text AS rubric_text FROM rankings r
        JOIN annotators a ON a.name = r.annotator
        LEFT JOIN tasks t ON t.id = r.task_id LEFT JOIN rubrics b ON b.version = r.rubric
        WHERE r.id = ? AND r.{SHOWN}"""
    row = next(iter(store.connections.db.query(query, [ranking_id])), None)
    if row is None:
        raise InputError(
            f"There is no ranking {ranking_id} in {store.connections.path}",
            "The ids stand in an export: rlhf export --db DB --out DIR",
        )
    numbers = {content["policy"]["hash"]: number for number, content in rounds(store).items()}
    tiers = json.loads(row["tiers"])
    found = {response.id: response for response in store.responses(row["prompt_id"])}
    return {
        "ranking": row["id"],
        "annotator": {"name": row["annotator"], "kind": row["kind"]},
        "rubric": {"version": row["rubric"], "text": row["rubric_text"] or ""},
        "reason": row["reason"] or "",
        "live": bool(row["live"]),
        "responses": [
            {
                "id": id_,
                "tier": place,
                "model": found[id_].model,
                "fingerprint": found[id_].model_fingerprint,
                "round": numbers.get(found[id_].model_fingerprint or "", 0),
            }
            for place, ids in enumerate(tiers, start=1)
            for id_ in ids
        ],
    }
