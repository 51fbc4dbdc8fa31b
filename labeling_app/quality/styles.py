"""What people reward: length, lists, hedging and refusals of responses, and how often they win.

Lists are recognized by their marks, hedging and refusals by English words. A number of one property
holds the others fixed: longer responses also have more lists.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2, sqrt

import numpy as np
from scipy.special import expit

from labeling_app.rankings.preferences import fit_preferences
from rlhf.run.intervals import NORMAL_975

PROPERTIES = ("is twice as long", "has a list", "hedges", "refuses")
MIN_PROMPTS = 20  # with pairs that differ in a property; with fewer, intervals are too narrow
OPENING = 160  # characters in which a refusal says so

_ITEM = re.compile(r"^ {0,3}(?:[-*+•]|\d{1,3}[.)])\s+\S", re.MULTILINE)
_HEDGE = re.compile(
    r"\b(?:perhaps|maybe|possibly|probably|presumably|might|i think|i believe|i guess|i suppose|"
    r"i'm not sure|i am not sure|not certain|it seems|it depends|as far as i know|in my opinion)\b",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|afraid),? (?:but )?i (?:can|am|must|do|don|won)|as an ai\b|"
    r"i(?:'m| am) (?:unable|not able) to|i (?:can't|cannot|can not|won't|will not) (?:help|assist|"
    r"provide|answer|comply|fulfill|create|give|share|write|support|do that|continue)|"
    r"i (?:must|have to) decline)",
    re.IGNORECASE,
)

Judged = tuple[str, Sequence[Sequence[str]]]  # the prompt, and tiers of response ids


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How often a response wins that differs from another in one property alone.

    `chance` is None where too few prompts have pairs that differ in it; `num_pairs` counts them.
    """

    name: str
    num_pairs: int
    chance: tuple[float, float, float] | None
    """The estimate and its 95 % interval."""


def properties_of(text: str) -> tuple[float, float, float, float]:
    """The numbers behind `PROPERTIES`: log2 of the characters, then 1 or 0 for each of the others.

    Worked example: "Perhaps." has 8 characters and hedges: (3, 0, 1, 0).
    """
    plain = text.replace("\u2019", "'")
    return (
        log2(max(len(text), 1)),
        float(len(_ITEM.findall(plain)) > 1),
        float(_HEDGE.search(plain) is not None),
        float(_REFUSAL.search(plain[:OPENING]) is not None),
    )


def what_wins(
    judged: Iterable[Judged], properties: Mapping[str, tuple[float, ...]]
) -> list[Effect]:
    """The effect of every property, from one regression over all judged pairs, ties aside.

    Args:
        judged: rankings.
        properties: of every ranked response, by id.
    """
    prompts: dict[str, int] = {}
    rows: list[tuple[float, ...]] = []
    numbers: list[int] = []
    for prompt, tiers in judged:
        number = prompts.setdefault(prompt, len(prompts))
        for index, tier in enumerate(tiers):
            worse = [response_id for lower in tiers[index + 1 :] for response_id in lower]
            for winner, loser in product(tier, worse):
                pair = zip(properties[winner], properties[loser], strict=True)
                rows.append(tuple(a - b for a, b in pair))
                numbers.append(number)
    differences = np.array(rows).reshape(-1, len(PROPERTIES))
    prompt_of = np.array(numbers, dtype=int)
    known = [
        column for column in range(len(PROPERTIES)) if _is_known(differences[:, column], prompt_of)
    ]
    fitted = fit_preferences(differences[:, known], prompt_of) if known else None
    chances: dict[int, tuple[float, float, float]] = {}
    if fitted is not None:
        for column, weight, variance in zip(known, fitted[0], np.diag(fitted[1]), strict=True):
            half = NORMAL_975 * sqrt(variance)
            low, value, high = (float(expit(weight + d)) for d in (-half, 0.0, half))
            chances[column] = value, low, high
    return [
        Effect(
            name=name,
            num_pairs=int(np.count_nonzero(differences[:, column])),
            chance=chances.get(column),
        )
        for column, name in enumerate(PROPERTIES)
    ]


def _is_known(differences: np.ndarray, prompts: np.ndarray) -> bool:
    """Whether pairs of enough prompts differ in a property, and neither side always wins."""
    differ = differences != 0
    is_mixed = bool((differences > 0).any() and (differences < 0).any())
    return is_mixed and len(np.unique(prompts[differ])) >= MIN_PROMPTS
