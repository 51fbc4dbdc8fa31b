"""Weights of annotators by how reliable they are; `rlhf/records/reliability.py` estimates that."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from rlhf.errors import InputError
from rlhf.records.reliability import (
    TOLERANCE,
    Item,
    PairLabel,
    Reliability,
    labels_of,
    reliability_of_shared,
)
from rlhf.records.schema import RankedPrompt


def collect_labels(records: Iterable[RankedPrompt]) -> list[PairLabel]:
    """The labels of every ranking; of several by one annotator on one item, the last."""
    labels: dict[tuple[Item, str], PairLabel] = {}
    for record in records:
        for ranking in record.rankings:
            for label in labels_of(record.prompt.id, ranking.annotator, ranking.tiers):
                labels[label.item, label.annotator] = label
    return list(labels.values())


def estimate_reliability(
    labels: Sequence[PairLabel], names: Iterable[str]
) -> dict[str, Reliability]:
    """The reliability of everybody in `names`, by name.

    Raises:
        InputError: no two annotators judged the same two responses.
    """
    known = reliability_of_shared(labels)
    if not known:
        raise InputError(
            "--annotator-weights auto compares annotators, and no two of them judged the same two "
            "responses",
            "Let two people rank some of the same prompts, or name the weights: "
            "--annotator-weights.NAME 0.5.",
        )
    unknown = Reliability(fmean(estimate.value for estimate in known.values()), None, None, 0)
    return {name: known.get(name, unknown) for name in sorted(names)}


def weights_of(reliability: Mapping[str, Reliability]) -> dict[str, float]:
    """max(0, log(a / (1 − a))), divided by the largest.

    The log-odds are the weights of a majority vote that is right most often (Nitzan and Paroush,
    International Economic Review 23(2), 1982), and of the E step in
    `rlhf.records.reliability.run_em`. An annotator who is right less than half of the time has
    weight 0 and is left out.

    Raises:
        InputError: nobody is right more often than a coin.
    """
    from scipy.special import logit  # absent on a rented GPU, which needs no weights

    odds = {name: max(0.0, float(logit(estimate.value))) for name, estimate in reliability.items()}
    largest = max(odds.values())
    if not largest > TOLERANCE:
        raise InputError(
            "By their agreement no annotator is right more often than a coin, and "
            "--annotator-weights auto leaves nobody to learn from",
            "Look at the disagreements in the labeling app, or name the weights: "
            "--annotator-weights.NAME 0.5.",
        )
    return {name: value / largest for name, value in odds.items()}
