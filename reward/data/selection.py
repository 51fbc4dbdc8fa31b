"""Which groups are trained on and which are held out: by hashes of ids, the same in every process.

All of it works on numbers of the groups, so that groups in a file are not read.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from reward.data.groups import Group
from reward.data.stored_groups import NUMBERS, Numbers, StoredGroups

Groups = TypeVar("Groups", bound=Sequence[Group])


def numbers_of(groups: Sequence[Group], column: str) -> Numbers:
    """One of NUMBERS of every group."""
    if isinstance(groups, StoredGroups):
        return groups.numbers(column)
    return np.array([NUMBERS[column](group) for group in groups], dtype=np.uint64)


def same_prompts(groups: Sequence[Group]) -> Numbers:
    """A number for the prompt of every group, which only groups with equal prompts share."""
    if isinstance(groups, StoredGroups):
        return groups.numbers("same_prompt")
    first: dict[tuple[int, ...], int] = {}
    return np.array([first.setdefault(group.prompt, place) for place, group in enumerate(groups)])


def select(groups: Groups, places: Iterable[int]) -> Groups:
    """The groups at some places."""
    if isinstance(groups, StoredGroups):
        return groups.select(np.fromiter(places, dtype=np.int64))  # type: ignore[return-value]
    return [groups[place] for place in places]  # type: ignore[return-value]


def with_pointwise(groups: Groups) -> Groups:
    """The groups with pointwise judgments."""
    return select(groups, np.flatnonzero(numbers_of(groups, "pointwise")))


def take_part(groups: Groups, number: int) -> Groups:
    """A number of groups, chosen by a hash of the prompt id: a larger number includes a smaller."""
    return select(groups, places_of_part(groups, number))


def places_of_part(groups: Sequence[Group], number: int) -> Numbers:
    """The places of the groups that `take_part` takes, in ascending order."""
    return np.sort(np.argsort(numbers_of(groups, "order"), kind="stable")[:number])


def hold_out(groups: Groups, fraction: float) -> tuple[Groups, Groups]:
    """Split groups into training and held-out ones by a hash of the prompt id.

    Groups with pairs and groups with thumbs alone are split separately, so that both can be
    measured; the only prompt of its kind is trained on. Equal prompts under several ids stay on the
    same side.
    """
    prompts, compared = same_prompts(groups), numbers_of(groups, "pairs") > 0
    chosen = [np.zeros(0, dtype=prompts.dtype)]
    for kind in (np.flatnonzero(compared), np.flatnonzero(~compared)):
        if len(np.unique(prompts[kind])) > 1:
            part = places_of_part(select(groups, kind), num_held_out(len(kind), fraction))
            chosen.append(prompts[kind[part]])
    aside = np.isin(prompts, np.concatenate(chosen))
    return select(groups, np.flatnonzero(~aside)), select(groups, np.flatnonzero(aside))


def num_held_out(number: int, fraction: float) -> int:
    """The number of held-out prompts: at least one."""
    return max(1, round(number * fraction))
