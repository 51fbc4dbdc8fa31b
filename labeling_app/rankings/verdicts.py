"""Thumbs, picks and edits as rankings, so that they are stored and exported like all others.

| a person | ranking |
| --- | --- |
| gives a thumb | one tier of one response, flagged `thumbs-up` or `thumbs-down` |
| picks one | the picked one above the others, which tie: nobody said which of them is better |
| finds them equal, or all bad | one tier of all, for all bad flagged `all-bad` |
| edits one | the edited text above the original, flagged `edited` |
"""

from collections.abc import Iterator, Sequence

from rlhf.errors import InputError
from rlhf.records.schema import Ranking
from rlhf.records.thumbs import ALL_BAD, LABELS, find_thumbs

EDITED = "edited"
THUMBS = {1: "thumbs-up", -1: "thumbs-down"}
THUMB_WORDS = {"up": THUMBS[1], "down": THUMBS[-1]}  # in lines of a file and from programs
TIE = "tie"
PERSON = "person"  # the model of a response that a person wrote

Tiers = tuple[tuple[str, ...], ...]


def pick(ids: Sequence[str], choice: int | str) -> tuple[Tiers, tuple[str, ...]]:
    """Tiers and flags of a choice among responses: a position, `tie` or `all-bad`.

    Raises:
        InputError: there is no such position, or no such word.
    """
    if choice in (TIE, ALL_BAD):
        return (tuple(ids),), (ALL_BAD,) if choice == ALL_BAD else ()
    if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < len(ids):
        raise InputError(
            f"{choice!r} is not a choice among {len(ids)} responses",
            f"Give a position from 0 to {len(ids) - 1}, or {TIE!r}, or {ALL_BAD!r}.",
        )
    rest = tuple(ids[:choice]) + tuple(ids[choice + 1 :])
    return ((ids[choice],), rest), ()


def subject(ranking: Ranking) -> tuple[str, frozenset[str]]:
    """The subject of a ranking: a later ranking by the same person on it replaces this one."""
    if EDITED in ranking.flags:
        return "edit", frozenset(ranking.tiers[-1])
    kind = "thumb" if LABELS.keys() & set(ranking.flags) else "pick"
    return kind, frozenset(i for tier in ranking.tiers for i in tier)


def labels(rankings: Sequence[Ranking]) -> Iterator[tuple[str, bool]]:
    """Which responses are good and which bad, as KTO wants it: (response id, good).

    A thumb is such a label. In a ranking the best tier is good and the worst bad (all tiers, if it
    is flagged all-bad), and those between have no label. If the same annotator gave a response a
    thumb, only the thumb counts. An edited text is good; its original is not therefore bad.
    """
    thumbed = {(r.annotator, i) for r in rankings for i, _ in find_thumbs(r)}
    for ranking in rankings:
        own = dict(find_thumbs(ranking))
        for response_id, good in (_labels(ranking) | own).items():
            if response_id in own or (ranking.annotator, response_id) not in thumbed:
                yield response_id, good


def _labels(ranking: Ranking) -> dict[str, bool]:
    if ALL_BAD in ranking.flags:
        return {i: False for tier in ranking.tiers for i in tier}
    if len(ranking.tiers) < 2 or LABELS.keys() & set(ranking.flags):
        return {}
    best = dict.fromkeys(ranking.tiers[0], True)
    return best if EDITED in ranking.flags else dict.fromkeys(ranking.tiers[-1], False) | best
