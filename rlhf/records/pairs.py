"""The pairs that rankings imply, for reward models, DPO and exports for trl."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from rlhf.records.schema import RankedPrompt, Ranking, Response

Name = TypeVar("Name")


@dataclass(frozen=True)
class Preference:
    """Two responses to a prompt of which one annotator found the first better."""

    chosen: Response
    rejected: Response
    margin: int


def pairs(ranking: Ranking) -> Iterator[tuple[str, str, int]]:
    """Every (better id, worse id, margin) that a ranking implies; ties give none.

    The margin is the sum of the strengths between the two tiers; 0, trl's default, without
    strengths.
    """
    yield from pairs_of_tiers(ranking.tiers, ranking.strengths)


def pairs_of_tiers(
    tiers: Sequence[Sequence[Name]], strengths: Sequence[int]
) -> Iterator[tuple[Name, Name, int]]:
    """`pairs` of responses that are named in any way, by numbers for example."""
    for high, low in combinations(range(len(tiers)), 2):
        margin = sum(strengths[high:low])
        for better in tiers[high]:
            for worse in tiers[low]:
                yield better, worse, margin


def preferences(record: RankedPrompt) -> Iterator[Preference]:
    """Every pair of every ranking of a prompt."""
    by_id = {response.id: response for response in record.responses}
    for ranking in record.rankings:
        for better, worse, margin in pairs(ranking):
            yield Preference(by_id[better], by_id[worse], margin)


def trl_preference(record: RankedPrompt, pair: Preference) -> dict[str, list[dict[str, str]]]:
    """A pair as trl's trainers read it: prompt, chosen and rejected as messages."""
    return {
        "prompt": record.prompt.chat,
        "chosen": [{"role": "assistant", "content": pair.chosen.text}],
        "rejected": [{"role": "assistant", "content": pair.rejected.text}],
    }
