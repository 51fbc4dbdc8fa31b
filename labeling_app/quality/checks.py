"""Agreement with known answers: scores for leads, feedback after training tasks for annotators."""

from collections import defaultdict
from dataclasses import dataclass

from labeling_app.db.board.checks import checked_rankings, training_answer
from labeling_app.db.connection import Connections
from labeling_app.rankings.agreement import Interval, mean_interval, pair_agreement


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """The feedback of a training task after the answer: positions in the order shown."""

    agreement: float
    expected: list[list[int]]
    explanation: str


def feedback_on(connections: Connections, annotator: str, task_id: int) -> Feedback | None:
    """Return the feedback on somebody's ranking of a training task.

    None for every other task, and before they have ranked it.
    """
    row = training_answer(connections, annotator, task_id)
    if row is None:
        return None
    answer, explanation, shown_order, given = row
    return Feedback(
        agreement=pair_agreement(given, answer) or 0.0,
        expected=[[shown_order.index(response) for response in tier] for tier in answer],
        explanation=explanation,
    )


def check_scores(connections: Connections) -> dict[str, dict[str, Interval | None]]:
    """For every purpose (gold, repeat) and person: agreement with the known answer."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for purpose, name, tiers, answer in checked_rankings(connections):
        value = pair_agreement(tiers, answer)
        if value is not None:
            values[purpose][name].append(value)
    return {
        purpose: {name: mean_interval(agreements) for name, agreements in people.items()}
        for purpose, people in values.items()
    }
