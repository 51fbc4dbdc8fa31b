"""The report on thumbs and "all bad": counts, weights and accuracy, beside those of pairs.

The reward model gets a pointwise judgment right if the reward is on the right side of b, the
threshold of its source (`reward.data.thresholds`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from reward.accuracy import accuracy_of_counts, pair_accuracy, plain_accuracy, win_credit
from reward.data.groups import Group, Pointwise
from reward.data.loading import Data
from reward.data.thresholds import Thresholds
from reward.model.normalize import Scale
from reward.settings import RewardSettings

OTHER_SOURCES = "all others"
Chosen = Callable[[Pointwise], bool]
Threshold = Callable[[Pointwise], float]


def describe_thumbs(
    settings: RewardSettings,
    data: Data,
    thresholds: Thresholds,
    level: float,
    rewards: Sequence[Sequence[float]],
    scale: Scale,
    bias: float,
) -> dict[str, Any]:
    """`judgements` by kind and `thresholds` by source, as report.json has them; {} without thumbs.

    Args:
        settings: of the stage, for the weights.
        data: what was trained on and what is held out.
        thresholds: fitted to the weights that are saved.
        level: the mean reward at which they were fitted.
        rewards: of the held-out responses, on the scale of training.
        scale: from outputs of the head to rewards of the saved model, the unit of the reported
            thresholds.
        bias: added to outputs of the head in training.
    """
    if not thresholds.sources:
        return {}

    values = thresholds.values(level)
    train = data.train.with_pointwise()

    def b(judgment: Pointwise) -> float:
        return values[thresholds.source(judgment.annotator)]

    def row(chosen: Chosen) -> dict[str, Any]:
        return {
            "train": count(train, chosen),
            "held_out": count(data.held_out, chosen),
            "accuracy": pointwise_accuracy(data.held_out, rewards, b, chosen),
        }

    pairs = {
        "weight": 1.0,
        "train": {"all": int(data.train.numbers("pairs").sum())},
        "held_out": {"all": sum(len(group.pairs) for group in data.held_out)},
        "accuracy": plain_accuracy(pair_accuracy(data.held_out, rewards)),
    }
    kinds = {
        kind: {"weight": weight, **row(_by(lambda judgment: judgment.kind, kind))}
        for kind, weight in settings.objective.pointwise_weights.items()
    }
    sources = {
        source or OTHER_SOURCES: {
            "threshold": scale.gain * (value - bias) + scale.bias,
            "fitted": thresholds.is_fitted(source),
            **row(_by(lambda judgment: thresholds.source(judgment.annotator), source)),
        }
        for source, value in values.items()
    }
    return {"judgements": {"pairs": pairs, **kinds}, "thresholds": sources}


def _by(name: Callable[[Pointwise], str], wanted: str) -> Chosen:
    return lambda judgment: name(judgment) == wanted


def count(groups: Sequence[Group], chosen: Chosen) -> dict[str, int]:
    """How many pointwise judgments, and how many of them say good."""
    verdicts = [
        judgment.is_good for group in groups for judgment in group.pointwise if chosen(judgment)
    ]
    return {"all": len(verdicts), "good": sum(verdicts)}


def pointwise_accuracy(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]],
    threshold: Threshold,
    chosen: Chosen = lambda judgment: True,
) -> dict[str, Any] | None:
    """Share of pointwise judgments on the right side of their threshold; None without any.

    `commoner` is the accuracy of always giving the more common answer. The interval comes from
    resampling prompts, as in `pair_accuracy`.
    """
    counts = []
    for group, values in zip(groups, rewards, strict=True):
        right = [
            win_credit(
                (1 if judgment.is_good else -1) * (values[judgment.response] - threshold(judgment))
            )
            for judgment in group.pointwise
            if chosen(judgment)
        ]
        counts.append((sum(right), len(right)))
    accuracy = accuracy_of_counts(counts)
    if accuracy is None:
        return None
    row = asdict(accuracy)
    number, good = row.pop("pairs"), count(groups, chosen)["good"]
    return {**row, "judgements": number, "commoner": max(good, number - good) / number}


def combine_thresholds(reports: Sequence[Mapping[str, Any]]) -> Threshold | None:
    """The thresholds of an ensemble that scores by the mean: the means of its members' thresholds.

    None if there are no thumbs.
    """
    if "thresholds" not in reports[0]:
        return None
    sources = reports[0]["thresholds"]
    means = {
        source: sum(report["thresholds"][source]["threshold"] for report in reports) / len(reports)
        for source in sources
    }
    return lambda judgment: means[
        judgment.annotator if judgment.annotator in means else OTHER_SOURCES
    ]
