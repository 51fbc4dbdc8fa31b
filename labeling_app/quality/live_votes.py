"""Votes of people in live mode, a row for each person; a question counts once."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from labeling_app.rankings.verdicts import EDITED, THUMBS
from rlhf.records.thumbs import ALL_BAD

LiveVote = tuple[str, str, str, str]  # the question, the annotator, tiers and flags as JSON


@dataclass(frozen=True, kw_only=True)
class LiveVotes:
    """One person's votes."""

    name: str
    questions: int
    """Those with a vote on one of their responses at least."""
    picks: int
    ties: int
    all_bad: int
    thumbs_up: int
    thumbs_down: int
    edits: int


def count_live_votes(votes: Iterable[LiveVote]) -> list[LiveVotes]:
    """Everybody's votes, by name."""
    questions: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for question, annotator, tiers, flags in votes:
        questions[annotator].add(question)
        counts[annotator][_kind_of(json.loads(tiers), json.loads(flags))] += 1
    kinds = ("picks", "ties", "all_bad", "thumbs_up", "thumbs_down", "edits")
    return [
        LiveVotes(
            name=name, questions=len(own_questions), **{kind: counts[name][kind] for kind in kinds}
        )
        for name, own_questions in sorted(questions.items())
    ]


def _kind_of(tiers: list[list[str]], flags: list[str]) -> str:
    known = {EDITED: "edits", THUMBS[1]: "thumbs_up", THUMBS[-1]: "thumbs_down", ALL_BAD: "all_bad"}
    flagged = [known[flag] for flag in flags if flag in known]
    return flagged[0] if flagged else "picks" if len(tiers) > 1 else "ties"
