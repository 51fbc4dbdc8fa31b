"""Scores and judged pairs as tiers: positions of responses, best first; those in one tier tie."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlhf.errors import InputError
from rlhf.records.wording import counted

Tiers = Sequence[Sequence[int]]
TIERS_EXAMPLE = "Count positions from 0, best tier first: [[2], [0, 1]]."
PAIRS_EXAMPLE = 'Write "pairs": [[0, 1, "first"], [0, 2, "tie"]], positions counted from 0.'


def tiers_of_scores(scores: list[float], tie_within: float) -> list[list[int]]:
    """Positions grouped into tiers, highest score first.

    A tier holds the scores within `tie_within` of its best: 0.9, 0.85, 0.8 with 0.05 → [[0, 1],
    [2]].
    """
    tiers: list[list[int]] = []
    for index in sorted(range(len(scores)), key=lambda i: -scores[i]):
        # The tolerance makes 0.9 - 0.85 count as 0.05, which it is not in binary.
        if tiers and scores[tiers[-1][0]] - scores[index] <= tie_within + 1e-12:
            tiers[-1].append(index)
        else:
            tiers.append([index])
    return tiers


def checked_tiers(tiers: Any, num_responses: int) -> Tiers:
    """Tiers as a file gives them, after checking that they hold positions of responses only.

    Raises:
        InputError: they are no lists of positions.
    """
    if not isinstance(tiers, list) or not all(isinstance(tier, list) for tier in tiers):
        raise InputError(f"tiers must be lists of positions, found {tiers!r:.80}", TIERS_EXAMPLE)
    for position in (position for tier in tiers for position in tier):
        if type(position) is not int or not 0 <= position < num_responses:
            raise InputError(
                f"tiers name position {position!r} of {counted(num_responses, 'response')}",
                TIERS_EXAMPLE,
            )
    return tiers


def judgments_of_pairs(pairs: Any, num_responses: int) -> list[Tiers]:
    """Pair judgments [i, j, "first" | "second" | "tie"] as rankings.

    When they cover every pair and fit one order, ties included, that order is the one ranking.
    Otherwise each pair stays a ranking of its own two responses: judgments can be intransitive, and
    then no order expresses them. The same holds if one pair got two different answers.

    Raises:
        InputError: a pair is malformed.
    """
    judgments: dict[tuple[int, int, str], Tiers] = {}
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if (
            not isinstance(pair, list)
            or len(pair) != 3
            or pair[0] == pair[1]
            or pair[2] not in ("first", "second", "tie")
        ):
            raise InputError(
                f"pairs must hold [i, j, first|second|tie], found {pair!r:.80}", PAIRS_EXAMPLE
            )
        checked_tiers([pair[:2]], num_responses)
        judgments.setdefault(_in_order(*pair), _pair_tiers(*pair))
    verdicts = {(first, second): verdict for first, second, verdict in judgments}
    wins = Counter({index: 0 for index in range(num_responses)})
    for (first, second), verdict in verdicts.items():
        wins[first] += (verdict == "first") - (verdict == "second")
        wins[second] += (verdict == "second") - (verdict == "first")
    levels = sorted(set(wins.values()), reverse=True)
    order = [[index for index in wins if wins[index] == level] for level in levels]
    complete = len(judgments) == len(verdicts) == num_responses * (num_responses - 1) // 2
    if complete and all(_verdict(wins, *pair) == verdict for pair, verdict in verdicts.items()):
        return [order]
    return list(judgments.values())


def _in_order(first: int, second: int, verdict: str) -> tuple[int, int, str]:
    """A pair that was asked the other way round says the same: the lower position comes first."""
    if first < second:
        return first, second, verdict
    return second, first, {"first": "second", "second": "first"}.get(verdict, verdict)


def _verdict(wins: Counter[int], first: int, second: int) -> str:
    if wins[first] == wins[second]:
        return "tie"
    return "first" if wins[first] > wins[second] else "second"


def _pair_tiers(first: int, second: int, verdict: str) -> Tiers:
    if verdict == "tie":
        return [[first, second]]
    return [[first], [second]] if verdict == "first" else [[second], [first]]
