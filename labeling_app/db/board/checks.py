"""Tasks with a known answer: training tasks, gold tasks, and repeats of one's own earlier work.

Training tasks come first, the others at random; on the board they look like all other tasks. Their
rankings are compared with the known answer and never exported. Only leads see the scores, and
nobody is excluded because of them.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sqlite_utils import Database

from labeling_app.db.board.leases import last_prompt
from labeling_app.db.connection import Connections
from labeling_app.db.tasks import KNOWN_ANSWER, CheckPurpose, insert_task, make_known_answer
from labeling_app.rankings.agreement import Tiers
from rlhf.errors import InputError
from rlhf.records.schema import Ranking

RANKINGS_BEFORE_REPEAT = 10


@dataclass(frozen=True, kw_only=True)
class CheckRates:
    """How often a check is mixed in: one in so many tasks; 0 is never."""

    gold_every: int = 0
    repeat_every: int = 0


def make_check(
    connections: Connections,
    answer: Ranking,
    responses: Sequence[str],
    purpose: CheckPurpose,
    explanation: str,
) -> bool:
    """Make a gold or training task in place of the prompt's ordinary one.

    Returns whether it was made: False where the same one exists.

    Args:
        connections: the database.
        answer: the known answer, for some or all of the responses.
        responses: the ids of what is shown.
        purpose: which of the two it is.
        explanation: what a training task says afterwards.

    Raises:
        InputError: somebody has seen the prompt, a round or an evaluation has chosen it, or it
            has another check.
    """
    prompt_id, known = answer.prompt_id, json.dumps(answer.tiers)
    with connections.write() as db:
        query = f"SELECT purpose, answer FROM tasks WHERE prompt_id = ? AND {KNOWN_ANSWER}"
        there = dict(db.execute(query, [prompt_id]).fetchall())
        if there.get(purpose) == known:
            return False
        if purpose in there:
            _refuse_check(purpose, "the prompt has one with another answer")
        if there:
            _refuse_check(purpose, f"the prompt has a {next(iter(there))} task")
        query = """SELECT EXISTS (SELECT 1 FROM assignments a WHERE a.task_id = t.id),
                       purpose <> 'rank' OR round_id IS NOT NULL
                   FROM tasks t WHERE prompt_id = ?"""
        tasks = db.execute(query, [prompt_id]).fetchall()
        if any(is_seen for is_seen, _ in tasks):
            _refuse_check(purpose, "somebody has seen this prompt")
        if any(is_chosen for _, is_chosen in tasks):
            _refuse_check(purpose, "a round or an evaluation has chosen this prompt")
        make_known_answer(db, prompt_id, responses, purpose, known, explanation)
        return True


def _refuse_check(purpose: CheckPurpose, reason: str) -> NoReturn:
    raise InputError(
        f"no {purpose} task was made: {reason}",
        "Import checks before people label, each prompt once.",
    )


def choose_check(db: Database, annotator: str, rates: CheckRates) -> int | None:
    """A check for this annotator now, or None: all training first, then by chance."""
    training = _next_check(db, annotator, "training")
    if training is not None:
        return training
    if rates.gold_every and random.random() < 1 / rates.gold_every:
        gold = _next_check(db, annotator, "gold")
        if gold is not None:
            return gold
    if rates.repeat_every and random.random() < 1 / rates.repeat_every:
        return _make_repeat(db, annotator)
    return None


def _next_check(db: Database, annotator: str, purpose: CheckPurpose) -> int | None:
    # The second condition is word for word that of the partial index, or it would not be used.
    query = """SELECT id FROM tasks t WHERE purpose = ?
               AND purpose IN ('gold', 'training', 'repeat') AND NOT EXISTS (
                   SELECT 1 FROM assignments a WHERE a.task_id = t.id
                   AND a.annotator = ? AND a.state <> 'expired')
               ORDER BY id LIMIT 1"""
    row = db.execute(query, [purpose, annotator]).fetchone()
    return int(row[0]) if row else None


def _make_repeat(db: Database, annotator: str) -> int | None:
    """Queue something this person ranked before, at least ten rankings ago and not repeated yet."""
    query = """
        SELECT r.prompt_id, r.tiers, t.responses FROM rankings r JOIN tasks t ON t.id = r.task_id
        WHERE r.annotator = :me AND r.live = 1 AND t.purpose = 'rank' AND t.decides IS NULL
        AND NOT EXISTS (SELECT 1 FROM tasks again WHERE again.prompt_id = r.prompt_id
            AND again.purpose = 'repeat' AND again.only_for = :me)
        ORDER BY r.created_at DESC LIMIT 1 OFFSET :rest"""
    row = db.execute(query, {"me": annotator, "rest": RANKINGS_BEFORE_REPEAT}).fetchone()
    if row is None:
        return None
    prompt_id, tiers, responses = row
    if prompt_id == last_prompt(db, annotator):  # such as a vote on it; another time
        return None
    return insert_task(
        db, prompt_id, json.loads(responses), purpose="repeat", answer=tiers, only_for=annotator
    )


def training_answer(
    connections: Connections, annotator: str, task_id: int
) -> tuple[Tiers, str, list[str], Tiers] | None:
    """The known answer of a training task, why it is right, and the order shown and tiers given.

    None for every other task, and before this annotator has ranked it.
    """
    query = """SELECT t.answer, t.reason, r.shown, r.tiers FROM tasks t JOIN rankings r
               ON r.task_id = t.id AND r.annotator = ? AND r.live = 1
               WHERE t.id = ? AND t.purpose = 'training'"""
    row = connections.db.execute(query, [annotator, task_id]).fetchone()
    if row is None:
        return None
    answer, explanation, shown_order, given = row
    return json.loads(answer), explanation, json.loads(shown_order), json.loads(given)


def checked_rankings(connections: Connections) -> Iterator[tuple[str, str, Tiers, Tiers]]:
    """(purpose, annotator, tiers, known answer) of every gold task and repeat that was ranked."""
    query = """
        SELECT t.purpose, r.annotator, r.tiers, t.answer FROM tasks t
        JOIN rankings r ON r.task_id = t.id AND r.live = 1
        WHERE t.purpose IN ('gold', 'repeat')"""
    for purpose, annotator, tiers, answer in connections.db.execute(query):
        yield purpose, annotator, json.loads(tiers), json.loads(answer)
