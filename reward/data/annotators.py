"""The weights of annotators: where they come from, and whose judgments a training learns from."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reward.data.batches import total_weight
from reward.data.groups import Group
from reward.data.reliability import collect_labels, estimate_reliability, weights_of
from reward.settings import Loss
from rlhf.records.reliability import Reliability
from rlhf.records.schema import RankedPrompt


@dataclass(frozen=True)
class AnnotatorWeights:
    """The weight of each annotator, 1 unless given, and the reliability it is computed from."""

    weights: Mapping[str, float]
    reliability: Mapping[str, Reliability] = field(default_factory=dict)


def estimate_weights(records: Iterable[RankedPrompt]) -> AnnotatorWeights:
    """Weights of those who ranked train prompts of the export, estimated from all of these.

    Raises:
        InputError: no two annotators judged the same responses, or none is better than chance.
    """
    names = set[str]()

    def train() -> Iterator[RankedPrompt]:
        for record in records:
            if record.prompt.split == "train":
                names.update(ranking.annotator for ranking in record.rankings)
                yield record

    labels = collect_labels(train())
    reliability = estimate_reliability(labels, names)
    return AnnotatorWeights(weights_of(reliability), reliability)


def weigh_annotators(
    groups: Sequence[Group], loss: Loss, chosen: AnnotatorWeights
) -> dict[str, dict[str, Any]]:
    """For every annotator the `weight`, the number of `judgements`, and their `share` of all.

    With estimated weights also the `reliability`.

    The share is Σ w_j / n_x over the annotator's judgments j, where prompt x has n_x judgments of
    all annotators (pairs or rankings, and pointwise ones, counted apart), divided by the same sum
    over everybody's.

    Args:
        groups: of the training.
        loss: which says what a judgment is: a pair or a ranking, or a pointwise one.
        chosen: the weights; annotators with weight 0 are in no group.
    """
    counts = Counter[str]()
    sums: dict[str, float] = defaultdict(float)
    for judgments in (judgments for group in groups for judgments in group.judgments(loss)):
        for judgment in judgments:
            counts[judgment.annotator] += 1
            sums[judgment.annotator] += judgment.weight / len(judgments)
    total = total_weight(groups, loss)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "weight": float(chosen.weights.get(name, 1.0)),
            "judgements": counts[name],
            "share": round(sums[name] / total, 4),
        }
        for name in sorted({*counts, *chosen.weights})
    }
    for name, reliability in chosen.reliability.items():
        rows[name]["reliability"] = asdict(reliability)
    return rows
