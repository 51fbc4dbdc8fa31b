"""Questions asked in live mode: their answers, the order shown, and the votes."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from labeling_app.db.board.submission_ids import unless_stored, used_id
from labeling_app.db.rankings import insert_ranking, live_rankings_outside_tasks, retire
from labeling_app.db.store import Store, ensure_annotator
from labeling_app.rankings.verdicts import subject
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, Ranking, Response


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question, its answers in the order shown, and its asker's current votes."""

    id: str
    annotator: str
    prompt: Prompt
    shown_order: tuple[str, ...]
    texts: dict[str, str]
    rankings: tuple[Ranking, ...]


def save_turn(
    store: Store, turn_id: str, annotator: str, prompt: Prompt, responses: Sequence[Response]
) -> None:
    """Store a question and its answers, given in the order shown. Nobody else will rank them.

    Raises:
        InputError: the annotator is a judge or a signal, or another question has that id.
    """
    with store.connections.write() as db:
        require_new_turn(store, turn_id)
        ensure_annotator(db, annotator, "human")
        store.add_prompts([prompt])
        store.add_responses(responses, queue=False)
        db.execute(
            "INSERT INTO live_turns VALUES (?, ?, ?, ?, ?)",
            [turn_id, annotator, prompt.id, json.dumps([r.id for r in responses]), time.time()],
        )


def require_new_turn(store: Store, turn_id: str) -> None:
    """Check that no stored question has that id.

    Raises:
        InputError: one has.
    """
    query = "SELECT 1 FROM live_turns WHERE id = ?"
    if store.connections.db.execute(query, [turn_id]).fetchone():
        raise used_id()


def latest_turn(store: Store, annotator: str) -> Turn | None:
    """The last answered question of an annotator."""
    query = "SELECT id FROM live_turns WHERE annotator = ? ORDER BY created_at DESC LIMIT 1"
    row = store.connections.db.execute(query, [annotator]).fetchone()
    return find_turn(store, annotator, row[0]) if row else None


def find_turn(store: Store, annotator: str, turn_id: str) -> Turn | None:
    """An answered question of this annotator, or None."""
    db = store.connections.db
    query = """SELECT t.shown, p.id, p.messages, p.split, p.source FROM live_turns t
               JOIN prompts p ON p.id = t.prompt_id WHERE t.id = ? AND t.annotator = ?"""
    row = db.execute(query, [turn_id, annotator]).fetchone()
    if row is None:
        return None
    stored, prompt_id, messages, split, source = row
    shown_order = tuple(json.loads(stored))
    # A question asked twice has one prompt; votes on the other answers do not belong here.
    about = [
        ranking
        for ranking in live_rankings_outside_tasks(db, prompt_id, annotator)
        if any(i in shown_order for tier in ranking.tiers for i in tier)
    ]
    chat = tuple(Message(**message) for message in json.loads(messages))
    query = "SELECT id, text FROM responses WHERE prompt_id = ?"
    return Turn(
        id=turn_id,
        annotator=annotator,
        prompt=Prompt(id=prompt_id, messages=chat, split=split, source=source),
        shown_order=shown_order,
        texts=dict(db.execute(query, [prompt_id])),
        rankings=tuple(about),
    )


def add_verdict(store: Store, ranking: Ranking, shown_order: Sequence[str]) -> None:
    """Append a vote; the same annotator's earlier vote on the same subject is retired.

    Sending the same vote again changes nothing.

    Raises:
        InputError: another vote was sent under its id.
    """
    with store.connections.write() as db:
        new = unless_stored(db, ranking)
        if new is None:
            return
        own = live_rankings_outside_tasks(db, new.prompt_id, new.annotator)
        old = [r.id for r in own if subject(r) == subject(new)]
        retire(db, old)
        before = old[-1] if old else None
        insert_ranking(db, new, shown=json.dumps(shown_order), supersedes=before)


def retire_verdict(store: Store, turn: Turn, like: Ranking) -> None:
    """Take back the votes on the same subject as `like`; they stay in the database."""
    with store.connections.write() as db:
        own = live_rankings_outside_tasks(db, turn.prompt.id, turn.annotator)
        retire(db, [ranking.id for ranking in own if subject(ranking) == subject(like)])


def require_turn(store: Store, annotator: str, turn_id: str) -> Turn:
    """A question of this annotator that was answered.

    Raises:
        InputError: there is none with that id.
    """
    turn = find_turn(store, annotator, turn_id)
    if turn is None:
        raise InputError(
            "The answers to this question are not stored", "Reload the page and ask again."
        )
    return turn
