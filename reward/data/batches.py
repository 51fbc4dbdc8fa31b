"""Which prompts meet in which optimizer step, on which process, in which forward pass.

All of it is a pure function of lengths, seed and step, so every process knows the whole plan
without talking, and a resumed run sees the same batches.
"""

from collections.abc import Sequence

import torch

from reward.data.groups import Group
from rlhf.modeling.attention.layout import Inputs, last_tokens, pack
from rlhf.modeling.tokens import pad_right


def epoch_order(num_groups: int, seed: int, epoch: int) -> list[int]:
    """A random order of the groups that depends on seed and epoch alone."""
    generator = torch.Generator().manual_seed(seed * 1_000 + epoch)
    order: list[int] = torch.randperm(num_groups, generator=generator).tolist()
    return order


def num_tokens(group: Group, *, shared: bool) -> int:
    """Tokens that a group costs, its prompt counted once or once for every response."""
    prompts = 1 if shared else len(group.responses)
    return prompts * len(group.prompt) + sum(map(len, group.responses))


def deal(groups: Sequence[Group], hands: int, *, shared: bool) -> list[list[Group]]:
    """Share groups among `hands`, longest first, so that all have about as many tokens."""
    shares: list[list[Group]] = [[] for _ in range(hands)]
    work = [0] * hands
    costs = {group.prompt_id: num_tokens(group, shared=shared) for group in groups}
    for group in sorted(groups, key=lambda one: costs[one.prompt_id], reverse=True):
        least = work.index(min(work))
        shares[least].append(group)
        work[least] += costs[group.prompt_id]
    return shares


def split_packed(groups: Sequence[Group], tokens: int) -> list[list[Group]]:
    """Cut groups into even packed rows of at most `tokens` tokens; a longer group goes alone."""
    if not groups:
        return []
    total = sum(num_tokens(group, shared=True) for group in groups)
    for rows in range(-(-total // tokens), len(groups)):
        parts = deal(groups, rows, shared=True)
        if all(_fits(part, tokens) for part in parts):
            return parts
    return [[group] for group in groups]


def _fits(part: Sequence[Group], tokens: int) -> bool:
    return len(part) == 1 or sum(num_tokens(group, shared=True) for group in part) <= tokens


def split_padded(groups: Sequence[Group], tokens: int) -> list[list[Group]]:
    """Cut groups into padded batches of at most `tokens` tokens; a larger group is a batch alone.

    Padding counts; the longest groups come first, so that neighbours are alike in length.
    """
    parts: list[list[Group]] = []
    width = rows = 0
    for group in sorted(groups, key=lambda one: one.longest, reverse=True):
        if not parts or (rows + len(group.responses)) * width > tokens:
            parts.append([])
            width, rows = group.longest, 0
        parts[-1].append(group)
        rows += len(group.responses)
    return parts


def plan_step(
    groups: Sequence[Group], processes: int, tokens: int, *, shared: bool
) -> list[list[list[Group]]]:
    """The forward passes of one optimizer step for every process.

    All processes make the same number of passes, empty ones if need be: sharded models gather
    weights together.
    """
    split = split_packed if shared else split_padded
    plans = [split(share, tokens) for share in deal(groups, processes, shared=shared)]
    busiest = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(busiest - len(plan))] for plan in plans]


def lay_out(groups: Sequence[Group], pad_id: int, *, shared: bool) -> Inputs:
    """Groups as a packed row or as padded rows of prompt + response; a padding token for none."""
    if shared:
        return pack([(group.prompt, group.responses) for group in groups], pad_id)
    sequences = [group.prompt + response for group in groups for response in group.responses]
    if not sequences:
        return Inputs(torch.full((1, 1), pad_id), torch.zeros(0, dtype=torch.long))
    batch = pad_right(sequences, pad_id)
    return Inputs(batch.ids, last_tokens(batch.mask.sum(dim=1), batch.ids.shape[1]))
