"""What the weights of annotators come to: whose judgements a training learns from, and how much."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from reward.data.groups import Group
from reward.objective import Objective, total_weight


def weigh_annotators(
    objective: Objective, groups: Sequence[Group], weights: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """For every annotator the `weight`, the number of `judgements`, and their `share` of all.

    The share is Σ w_j / n_x over her judgements j, where prompt x has n_x judgements of all
    annotators (pairs or rankings, and pointwise ones, counted apart), divided by the same sum over
    everybody's.

    Args:
        objective: says what a judgement is: a pair or a ranking, or a pointwise one.
        groups: of the training.
        weights: those that were given; who has none counts 1, and who has 0 is in no group.
    """
    judgements = Counter[str]()
    sums: dict[str, float] = defaultdict(float)
    for found in (found for group in groups for found in objective.judgements(group)):
        for one in found:
            judgements[one.annotator] += 1
            sums[one.annotator] += one.weight / len(found)
    total = total_weight(objective, groups)
    return {
        name: {
            "weight": float(weights.get(name, 1.0)),
            "judgements": judgements[name],
            "share": round(sums[name] / total, 4),
        }
        for name in sorted({*judgements, *weights})
    }
