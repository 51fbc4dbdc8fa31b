"""What the weights of annotators come to: whose judgments a training learns from, and how much."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from reward.data.batches import total_weight
from reward.data.groups import Group
from reward.settings import Loss


def weigh_annotators(
    groups: Sequence[Group], loss: Loss, weights: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """For every annotator the `weight`, the number of `judgments`, and their `share` of all.

    The share is Σ w_j / n_x over her judgments j, where prompt x has n_x judgments of all
    annotators (pairs or rankings, and pointwise ones, counted apart), divided by the same sum over
    everybody's.

    Args:
        groups: of the training.
        loss: which says what a judgment is: a pair or a ranking, or a pointwise one.
        weights: those that were given; others count 1, and who has 0 is in no group.
    """
    judgments = Counter[str]()
    sums: dict[str, float] = defaultdict(float)
    for found in (found for group in groups for found in group.judgments(loss)):
        for one in found:
            judgments[one.annotator] += 1
            sums[one.annotator] += one.weight / len(found)
    total = total_weight(groups, loss)
    return {
        name: {
            "weight": float(weights.get(name, 1.0)),
            "judgements": judgments[name],
            "share": round(sums[name] / total, 4),
        }
        for name in sorted({*judgments, *weights})
    }
