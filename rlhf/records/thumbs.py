"""Pointwise judgments: single responses that the flags of a ranking call good or bad.

| flag | meaning |
| --- | --- |
| `thumbs-up`, `thumbs-down` | the best tier, which is one response for a thumb, is good or bad |
| `thumbs-up@ID`, `thumbs-down@ID` | that response is good or bad |
| `all-bad` | every response in the tiers is bad; the order of the tiers still counts |
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.records.schema import Ranking

PointwiseKind = Literal["thumbs", "all_bad"]

ALL_BAD = "all-bad"
LABELS = {"thumbs-up": True, "thumbs-down": False}


@dataclass(frozen=True)
class PointwiseJudgment:
    """One response that the flags of a ranking call good or bad."""

    ranking: Ranking
    response_id: str
    is_good: bool
    kind: PointwiseKind


def pointwise_judgments(
    rankings: Sequence[Ranking], down_flags: Collection[str] = ()
) -> Iterator[PointwiseJudgment]:
    """Every pointwise judgment of one prompt.

    A thumb replaces the same annotator's "all bad" for that response.

    `down_flags` are flags of single responses that count as a thumb down, such as unsafe.
    """
    thumbed: set[tuple[str, str]] = set()
    for ranking in rankings:
        for response_id, is_good in find_thumbs(ranking, down_flags):
            thumbed.add((ranking.annotator, response_id))
            yield PointwiseJudgment(ranking, response_id, is_good, "thumbs")
    for ranking in rankings:
        if ALL_BAD in ranking.flags:
            for response_id in (id_ for tier in ranking.tiers for id_ in tier):
                if (ranking.annotator, response_id) not in thumbed:
                    yield PointwiseJudgment(ranking, response_id, False, "all_bad")


def find_thumbs(ranking: Ranking, down_flags: Collection[str] = ()) -> list[tuple[str, bool]]:
    """The thumbs in the flags of one ranking as (response id, good), without repetition."""
    thumbs: dict[tuple[str, bool], None] = {}
    for flag in ranking.flags:
        name, at, response_id = flag.partition("@")
        if name in LABELS:
            about = (response_id,) if at else ranking.tiers[0]
            thumbs |= dict.fromkeys((id_, LABELS[name]) for id_ in about)
        elif at and name in down_flags:
            thumbs[response_id, False] = None
    return list(thumbs)
