"""Which prompts and which stored rows a step uses; the same on every machine and after a resume."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow

Item = TypeVar("Item")


def choose_prompts(
    prompts: Sequence[tuple[ReferenceRow, ...]],
    step: int,
    per_step: int,
    repeats: int,
    seed: int,
    *,
    rank: int,
    ranks: int,
) -> list[tuple[ReferenceRow, ...]]:
    """This process's share of a step's prompts: each once per epoch, newly shuffled.

    Args:
        prompts: the stored rows of every training prompt.
        step: from 1.
        per_step: prompts of a step, over all processes.
        repeats: how often each stands in the result, in a row.
        seed: of the shuffling.
        rank: of this process.
        ranks: how many processes there are.
    """
    chosen = deal(prompts, step, per_step, seed, rank=rank, ranks=ranks)
    return [rows for rows in chosen for _ in range(repeats)]


def deal(
    items: Sequence[Item], step: int, per_step: int, seed: int, *, rank: int, ranks: int
) -> list[Item]:
    """This process's share of the items of a step: each once per epoch, newly shuffled.

    Args:
        items: what is dealt out.
        step: from 1.
        per_step: items of a step, over all processes.
        seed: of the shuffling.
        rank: of this process.
        ranks: how many processes there are.
    """
    positions = range((step - 1) * per_step + rank, step * per_step, ranks)
    places = [divmod(position, len(items)) for position in positions]
    orders = {
        epoch: torch.randperm(len(items), generator=torch.Generator().manual_seed(seed + epoch))
        for epoch in {epoch for epoch, _ in places}
    }
    return [items[int(orders[epoch][place])] for epoch, place in places]


def choose_reference_rows(
    chosen: Sequence[tuple[ReferenceRow, ...]],
    step: int,
    settings: PPOSettings,
    generator: torch.Generator,
) -> list[ReferenceRow]:
    """Stored rows of the step's prompts for the KL term; M samples of a prompt take turns."""
    if settings.kl.source != "reference":
        return []
    count = max(1, round(len(chosen) * settings.kl.rows_per_prompt))
    picked = torch.randperm(len(chosen), generator=generator)[:count].tolist()
    return [chosen[index][step % len(chosen[index])] for index in picked]
