"""How people do on tasks whose answer is known: for the lead, and after training for themselves."""

import json
from collections import defaultdict
from dataclasses import dataclass

from labeling_app.db.connection import Connections
from labeling_app.rankings.agreement import Interval, mean_interval, pair_agreement


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """What a training task says after the answer: positions in the order shown."""

    agreement: float
    expected: list[list[int]]
    explanation: str


def feedback_on(connections: Connections, annotator: str, task_id: int) -> Feedback | None:
    """What to tell somebody about their ranking of a training task.

    None for every other task, and before they have ranked it.
    """
    query = """SELECT t.answer, t.reason, r.shown, r.tiers FROM tasks t JOIN rankings r
               ON r.task_id = t.id AND r.annotator = ? AND r.live = 1
               WHERE t.id = ? AND t.purpose = 'training'"""
    row = connections.db.execute(query, [annotator, task_id]).fetchone()
    if row is None:
        return None
    answer, explanation, shown, given = json.loads(row[0]), row[1], *map(json.loads, row[2:])
    return Feedback(
        agreement=pair_agreement(given, answer) or 0.0,
        expected=[[shown.index(response) for response in tier] for tier in answer],
        explanation=explanation,
    )


def check_scores(connections: Connections) -> dict[str, dict[str, Interval | None]]:
    """For every purpose (gold, repeat) and person: agreement with the known answer."""
    query = """
        SELECT t.purpose, r.annotator, r.tiers, t.answer FROM tasks t
        JOIN rankings r ON r.task_id = t.id AND r.live = 1
        WHERE t.purpose IN ('gold', 'repeat')"""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for purpose, name, tiers, answer in connections.db.execute(query):
        value = pair_agreement(json.loads(tiers), json.loads(answer))
        if value is not None:
            values[purpose][name].append(value)
    return {
        purpose: {name: mean_interval(found) for name, found in people.items()}
        for purpose, people in values.items()
    }
