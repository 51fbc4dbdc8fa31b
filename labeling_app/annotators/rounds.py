"""Rounds of labeling: samples of the newest policy into the queue, and where a ranking came from.

A round is identified by the policy that was sampled; responses of no round have round 0.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from labeling_app.db.rankings import find_ranking
from labeling_app.db.rounds import ensure_round, rounds
from labeling_app.db.store import Store
from labeling_app.db.tasks import default_overlap, highest_priority, insert_task, is_chosen
from rlhf.errors import InputError
from rlhf.records.schema import Prompt, Response

Chosen = tuple[Prompt, Sequence[Response], str]


def queue_round(
    store: Store,
    inputs: dict[str, dict[str, str]],
    chosen: Sequence[Chosen],
    settings: dict[str, Any],
) -> dict[str, int]:
    """Queue the chosen prompts before all other tasks, and record this round's policy.

    Running it again with the same policy adds only new prompts; what is stored of the round stays
    as it is.

    Args:
        store: the database.
        inputs: path and hash of the policy that was sampled, of the reward model and the reference.
        chosen: a prompt, the responses to rank, and why it was chosen; the best first.
        settings: how they were sampled and chosen; kept with the round.

    Returns:
        The round's number and how many prompts are newly queued.
    """
    content = {**inputs, "settings": settings, "at": time.time()}
    with store.connections.write() as db:
        number = ensure_round(db, inputs["policy"]["hash"], content)
        store.add_prompts(prompt for prompt, _, _ in chosen)
        store.add_responses((r for _, responses, _ in chosen for r in responses), queue=False)
        top, overlap, queued = highest_priority(db), default_overlap(db), 0
        for index, (prompt, responses, reason) in enumerate(chosen):
            ids = [response.id for response in responses]
            if not is_chosen(db, prompt.id, ids):
                insert_task(
                    db,
                    prompt.id,
                    ids,
                    overlap=overlap,
                    round_id=number,
                    priority=top + len(chosen) - index,
                    reason=f"round {number}: {reason}",
                )
                queued += 1
    return {"round": number, "queued": queued}


def trace(store: Store, ranking_id: str) -> dict[str, Any]:
    """Where a ranking came from: annotator, rubric, and of every response its model and round.

    Raises:
        InputError: there is no such ranking.
    """
    row = find_ranking(store.connections, ranking_id)
    if row is None:
        raise InputError(
            f"There is no ranking {ranking_id} in {store.connections.path}",
            "The ids are in an export: rlhf export --db DB --out DIR",
        )
    by_number = rounds(store.connections)
    numbers = {content["policy"]["hash"]: number for number, content in by_number.items()}
    tiers = json.loads(row["tiers"])
    responses = {response.id: response for response in store.responses(row["prompt_id"])}
    return {
        "ranking": row["id"],
        "annotator": {"name": row["annotator"], "kind": row["kind"]},
        "rubric": {"version": row["rubric"], "text": row["rubric_text"] or ""},
        "reason": row["reason"] or "",
        "live": bool(row["live"]),
        "responses": [
            {
                "id": id_,
                "tier": tier,
                "model": responses[id_].model,
                "fingerprint": responses[id_].model_fingerprint,
                "round": numbers.get(responses[id_].model_fingerprint or "", 0),
            }
            for tier, ids in enumerate(tiers, start=1)
            for id_ in ids
        ],
    }
