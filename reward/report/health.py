"""Where a reward model is right and where not: numbers over held-out judgments.

Accuracy by annotator, agreement, strength, length and prompt; calibration; the accuracy of choosing
the longer response; how well people agree with each other; and the worst disagreements.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import exp, sqrt
from statistics import median
from typing import Any

from reward.accuracy import accuracy_of_counts, win_credit
from reward.data.groups import Group, Pair

NUM_BINS = 10
NUM_WORST = 20
SIMILAR_LENGTH = 0.2


@dataclass(frozen=True)
class Verdict:
    """One judged preference (no tie), and the winner's reward minus the loser's."""

    group: Group
    pair: Pair
    difference: float

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the preferred response and of the other one."""
        responses = self.group.responses
        return len(responses[self.pair.first]), len(responses[self.pair.second])

    @property
    def both(self) -> tuple[str, int, int]:
        """The two responses in a fixed order, the same for every annotator."""
        first, second = sorted((self.pair.first, self.pair.second))
        return self.group.prompt_id, first, second


def collect_verdicts(groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> list[Verdict]:
    """Every preference of every group, with its reward difference."""
    return [
        Verdict(group, pair, values[pair.first] - values[pair.second])
        for group, values in zip(groups, rewards, strict=True)
        for pair in group.pairs
        if pair.outcome != 0.5
    ]


def describe_health(
    verdicts: Sequence[Verdict],
    texts: Callable[[Verdict], dict[str, str]],
    *,
    unit: str = "tokens",
) -> dict[str, Any]:
    """The part of a health report on its verdicts: the numbers, the worst, and counts by prompt.

    Args:
        verdicts: as in `measure_health`.
        texts: `prompt`, `preferred` and `other` of a verdict, for people to read.
        unit: of the lengths in the groups.
    """
    return {
        "health": measure_health(verdicts, unit),
        "worst": [
            {
                **texts(verdict),
                "annotator": verdict.pair.annotator,
                "difference": verdict.difference,
            }
            for verdict in worst(verdicts)
        ],
        "held_out_counts": count_by_prompt(verdicts),
    }


def measure_health(verdicts: Sequence[Verdict], unit: str = "tokens") -> dict[str, Any]:
    """All numbers of the health report, as plain JSON values.

    Args:
        verdicts: preferences with reward differences on the scale of the training loss, so that
            σ(difference) is the probability the model gives to the preference.
        unit: of the lengths in the groups.
    """
    middle = median(len(verdict.group.prompt) for verdict in verdicts) if verdicts else 0
    level = agreement_levels(verdicts)
    return {
        "accuracy_by": {
            "annotator": accuracy_by(verdicts, lambda v: v.pair.annotator),
            "agreement": accuracy_by(verdicts, lambda v: level[v.both]),
            "strength": accuracy_by(verdicts, _strength),
            "length": accuracy_by(verdicts, length_gap),
            "prompt": accuracy_by(
                verdicts,
                lambda v: (
                    f"up to {middle:g} {unit}"
                    if len(v.group.prompt) <= middle
                    else f"over {middle:g} {unit}"
                ),
            ),
        },
        "calibration": calibrate(verdicts),
        "longer_wins": _accuracy(verdicts, lambda v: win_credit(v.lengths[0] - v.lengths[1])),
        "judges_agree": judges_agree(verdicts),
    }


def accuracy_by(
    verdicts: Sequence[Verdict], label: Callable[[Verdict], str]
) -> dict[str, dict[str, Any]]:
    """Accuracy of the verdicts with the same label, for every label."""
    parts: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        parts[label(verdict)].append(verdict)
    accuracies = {name: _accuracy(part, _is_right) for name, part in parts.items()}
    return {name: accuracies[name] for name in sorted(accuracies)}


def _accuracy(verdicts: Sequence[Verdict], right: Callable[[Verdict], float]) -> dict[str, Any]:
    accuracy = accuracy_of_counts(count_by_prompt(verdicts, right).values())
    return asdict(accuracy) if accuracy else {}


def _is_right(verdict: Verdict) -> float:
    return win_credit(verdict.difference)


def count_by_prompt(
    verdicts: Sequence[Verdict], right: Callable[[Verdict], float] = _is_right
) -> dict[str, tuple[float, int]]:
    """For every prompt, by id, how many verdicts are right and how many there are."""
    counts: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for verdict in verdicts:
        before, number = counts[verdict.group.prompt_id]
        counts[verdict.group.prompt_id] = (before + right(verdict), number + 1)
    return dict(counts)


def _strength(verdict: Verdict) -> str:
    names = {0: "not given", 1: "1 slight", 2: "2 clear"}
    return names.get(verdict.pair.strength, "3 or more, large")


def length_gap(verdict: Verdict) -> str:
    """Whether the preferred response is the longer one, by more than a fifth of the longer."""
    preferred, other = verdict.lengths
    if abs(preferred - other) <= SIMILAR_LENGTH * max(preferred, other):
        return "similar length"
    return "preferred is longer" if preferred > other else "preferred is shorter"


def agreement_levels(verdicts: Sequence[Verdict]) -> dict[tuple[str, int, int], str]:
    """For every two responses how their judges agree: one judge, all agree, or judges differ.

    Verdicts of one name are one judge's, also where nobody was named in an import.
    """
    levels = {}
    for both, judgments in _judgments_by_pair(verdicts).items():
        judges, winners = ({*values} for values in zip(*judgments, strict=True))
        if len(judges) == 1:
            levels[both] = "one judge"
        else:
            levels[both] = "all agree" if len(winners) == 1 else "judges differ"
    return levels


def judges_agree(verdicts: Sequence[Verdict]) -> dict[str, float] | None:
    """How often two judges of the same two responses prefer the same one; None without such pairs.

    `ceiling` is the accuracy of a model that always gives the majority's preference, if judges err
    independently and agree with the majority with probability p: their agreement is
    a = p² + (1 − p)², so p = (1 + √(2a − 1)) / 2.
    """
    same = [
        a == b
        for judgments in _judgments_by_pair(verdicts).values()
        for (judge, a), (other, b) in combinations(judgments, 2)
        if judge != other
    ]
    if not same:
        return None
    value = sum(same) / len(same)
    return {"value": value, "n": len(same), "ceiling": (1 + sqrt(max(0, 2 * value - 1))) / 2}


def _judgments_by_pair(
    verdicts: Sequence[Verdict],
) -> dict[tuple[str, int, int], list[tuple[str, int]]]:
    """For every two responses (annotator, winner) of each verdict."""
    judgments: dict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)
    for verdict in verdicts:
        judgments[verdict.both].append((verdict.pair.annotator, verdict.pair.first))
    return judgments


def calibrate(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Expected calibration error (Naeini et al., 2015) and its bins.

    The confidence of a verdict is σ(|difference|), from ½ to 1; a calibrated model is right in 80 %
    of the verdicts with confidence 0.8. ECE = Σ_bins n/N · |right − confidence|.
    """
    bins: list[list[tuple[float, float]]] = [[] for _ in range(NUM_BINS)]
    for verdict in verdicts:
        confidence = 1 / (1 + exp(-min(abs(verdict.difference), 700)))
        number = min(int((confidence - 0.5) * 2 * NUM_BINS), NUM_BINS - 1)
        bins[number].append((confidence, win_credit(verdict.difference)))
    rows = [
        {
            "confidence": sum(c for c, _ in members) / len(members),
            "right": sum(r for _, r in members) / len(members),
            "n": len(members),
        }
        for members in bins
        if members
    ]
    total = sum(row["n"] for row in rows)
    error = sum(row["n"] * abs(row["right"] - row["confidence"]) for row in rows)
    return {"ece": error / total if total else None, "bins": rows}


def worst(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with the largest wrong differences, each two responses once."""
    chosen: dict[tuple[str, int, int], Verdict] = {}
    for verdict in sorted(verdicts, key=lambda v: v.difference):
        if verdict.difference < 0:
            chosen.setdefault(verdict.both, verdict)
    return list(chosen.values())[:NUM_WORST]
