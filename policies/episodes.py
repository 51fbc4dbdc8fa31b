"""Which prompts and which stored rows a step uses; the same on every machine and after a resume."""

from collections.abc import Sequence

import torch

from policies.reference_store import ReferenceRow
from policies.settings import PPOSettings


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
    chosen = []
    for position in range((step - 1) * per_step + rank, step * per_step, ranks):
        epoch, place = divmod(position, len(prompts))
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(prompts), generator=generator)
        chosen += [prompts[int(order[place])]] * repeats
    return chosen


def choose_reference_rows(
    chosen: Sequence[tuple[ReferenceRow, ...]],
    step: int,
    settings: PPOSettings,
    generator: torch.Generator,
) -> list[ReferenceRow]:
    """Stored rows of the step's prompts for the KL term; M samples of a prompt take turns."""
    if settings.kl.source != "reference":
        return []
    count = max(1, round(len(chosen) * settings.kl.rows_per_episode))
    picked = torch.randperm(len(chosen), generator=generator)[:count].tolist()
    return [chosen[index][step % len(chosen[index])] for index in picked]
