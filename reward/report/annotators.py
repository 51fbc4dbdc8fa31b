"""The estimated weights of annotators, described in sentences."""

from collections.abc import Iterator, Mapping
from typing import Any

CHANCE = 0.5


def describe_annotators(annotators: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Who is not proven better than chance, and who could not be compared.

    Args:
        annotators: as report.json holds them; without `reliability`, weights were given by hand.
    """
    known = {name: row for name, row in annotators.items() if "reliability" in row}
    if not known:
        return
    yield f"Weights of {len(known)} annotators are estimated from their agreement with each other."
    doubted = [
        f"{name} (right in {100 * reliability['value']:.0f} % of {reliability['shared']} shared "
        f"judgments, weight {known[name]['weight']:.2g})"
        for name, reliability in ((name, row["reliability"]) for name, row in known.items())
        if reliability["shared"] and reliability["low"] <= CHANCE
    ]
    if doubted:
        yield f"Not proven better than chance: {', '.join(doubted)}."
    alone = [name for name, row in known.items() if not row["reliability"]["shared"]]
    if alone:
        yield (
            f"Nobody else judged the same responses as {', '.join(alone)}, who count as much as an "
            "annotator of mean reliability."
        )
