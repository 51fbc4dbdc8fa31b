"""From groups to batches: which prompts share an optimizer step and a forward pass, as tensors.

All of it is a pure function of the groups, the seed and the step: every process computes the whole
plan without communication, and a resumed run sees the same batches.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reward.data.groups import Group, Pair, Pointwise, TieredRanking
from reward.losses import Judgments, PairTensors, PointwiseTensors, RankingTensors
from reward.settings import Loss
from rlhf.modeling.attention.layout import (
    TokenIds,
    TrunkInputs,
    common_prefix_length,
    last_tokens,
    pack_prompts,
)
from rlhf.modeling.attention.shared_prefix import LEAST_SAVING
from rlhf.modeling.tokens import pad_right, send

Judgment = TypeVar("Judgment", Pair, TieredRanking, Pointwise)
Beginning = tuple[TokenIds, Sequence[TokenIds]]  # tokens encoded once, and all that follows them


def epoch_order(num_groups: int, seed: int, epoch: int) -> list[int]:
    """A random order of the groups that depends on seed and epoch alone."""
    generator = torch.Generator().manual_seed(seed * 1_000 + epoch)
    order: list[int] = torch.randperm(num_groups, generator=generator).tolist()
    return order


def num_tokens(group: Group, *, shared: bool) -> int:
    """Tokens that a group costs, its prompt counted once or once for every response."""
    prompts = 1 if shared else len(group.responses)
    return prompts * len(group.prompt) + sum(map(len, group.responses))


def balance(groups: Sequence[Group], number: int, *, shared: bool) -> list[list[Group]]:
    """Divide groups into `number` parts of about as many tokens, assigning the longest first."""
    parts: list[list[Group]] = [[] for _ in range(number)]
    totals = [0] * number
    costs = {group.prompt_id: num_tokens(group, shared=shared) for group in groups}
    for group in sorted(groups, key=lambda group: costs[group.prompt_id], reverse=True):
        least = totals.index(min(totals))
        parts[least].append(group)
        totals[least] += costs[group.prompt_id]
    return parts


def split_packed(groups: Sequence[Group], tokens: int) -> list[list[Group]]:
    """Split groups into even packed rows of at most `tokens` tokens; a longer group has its own."""
    if not groups:
        return []
    for rows in range(-(-_size(_beginnings(groups)) // tokens), len(groups)):
        parts = balance(groups, rows, shared=True)
        if all(len(part) == 1 or _size(_beginnings(part)) <= tokens for part in parts):
            return parts
    return [[group] for group in groups]


def _beginnings(groups: Sequence[Group]) -> list[Beginning]:
    """The tokens that a packed row encodes once, and what follows: each prompt, or a common prefix.

    A long system turn of all prompts saves more than the prompts of few responses each. One segment
    for all is padded to the longest of them, so it must not have more attention scores either.
    """
    by_prompt: list[Beginning] = [(group.prompt, group.responses) for group in groups]
    rows = [group.prompt + response for group in groups for response in group.responses]
    if len(groups) < 2 or not rows:
        return by_prompt
    common = common_prefix_length(rows)
    of_all: list[Beginning] = [(rows[0][:common], [row[common:] for row in rows])]
    saves = _size(of_all) <= (1 - LEAST_SAVING) * _size(by_prompt)
    return of_all if saves and _scores(of_all) <= _scores(by_prompt) else by_prompt


def _size(beginnings: Sequence[Beginning]) -> int:
    """Tokens of a packed row."""
    return sum(len(first) + sum(map(len, rest)) for first, rest in beginnings)


def split_padded(groups: Sequence[Group], tokens: int) -> list[list[Group]]:
    """Split groups into padded batches of at most `tokens` tokens; a larger group gets its own.

    Padding counts. Groups are sorted by length, so that those of a batch are about as long.
    """
    parts: list[list[Group]] = []
    width = rows = 0
    for group in sorted(groups, key=lambda group: group.longest, reverse=True):
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

    All processes make the same number of passes, empty ones if need be: to gather the weights of a
    sharded model, all must take part.
    """
    split = split_packed if shared else split_padded
    plans = [split(part, tokens) for part in balance(groups, processes, shared=shared)]
    busiest = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(busiest - len(plan))] for plan in plans]


def _scores(beginnings: Sequence[Beginning]) -> int:
    """Attention scores of a head, responses padded to the longest with the same beginning."""
    total = 0
    for first, rest in beginnings:
        longest = max(map(len, rest), default=0)
        total += len(first) ** 2 + len(rest) * longest * (len(first) + longest)
    return total


def lay_out(groups: Sequence[Group], pad_id: int, *, shared: bool) -> TrunkInputs:
    """Groups as one packed row, or as padded rows of prompt + response.

    No groups give a single padding token.
    """
    if shared:
        return pack_prompts(_beginnings(groups), pad_id)
    pairs = [(group.prompt, response) for group in groups for response in group.responses]
    if not pairs:
        ones = torch.ones((1, 1), dtype=torch.long)
        return TrunkInputs(ones * pad_id, torch.zeros(0, dtype=torch.long), parts=ones)
    batch = pad_right([prompt + response for prompt, response in pairs], pad_id)
    parts = pad_right([[1] * len(prompt) + [2] * len(response) for prompt, response in pairs], 0)
    ends = last_tokens(batch.mask.sum(dim=1), batch.ids.shape[1])
    return TrunkInputs(batch.ids, ends, parts=parts.ids)


def total_weight(groups: Sequence[Group], loss: Loss) -> float:
    """The divisor of `sum_of_losses` for a whole batch: Σ_x (Σ_j w_j) / n_x.

    That is the number of prompts where all weights are 1; a prompt with comparisons and pointwise
    judgments counts twice. Every process knows the whole batch, so all agree on it.
    """
    judged = (judgments for group in groups for judgments in group.judgments(loss))
    return math.fsum(
        math.fsum(judgment.weight for judgment in judgments) / len(judgments)
        for judgments in judged
    )


def to_judgments(groups: Sequence[Group], loss: Loss, device: torch.device) -> Judgments:
    """All judgments of some groups as tensors, responses numbered as `lay_out` places them."""
    compared = any(group.pairs for group in groups)
    ranked = compared and loss != "bradley_terry"
    has_pointwise = any(group.pointwise for group in groups)
    return Judgments(
        len(groups),
        to_pair_tensors(groups, device) if compared else None,
        to_ranking_tensors(groups, device) if ranked else None,
        to_pointwise_tensors(groups, device) if has_pointwise else None,
    )


def to_pair_tensors(groups: Sequence[Group], device: torch.device) -> PairTensors:
    """The pairs of all groups."""
    pairs = list(_numbered((group, group.pairs) for group in groups))

    def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
        return send(torch.tensor(values, dtype=dtype), device)

    return PairTensors(
        first=tensor([base + pair.first for _, base, pair in pairs], torch.long),
        second=tensor([base + pair.second for _, base, pair in pairs], torch.long),
        outcome=tensor([pair.outcome for _, _, pair in pairs], torch.float32),
        strength=tensor([pair.strength for _, _, pair in pairs], torch.float32),
        weight=tensor([pair.weight for _, _, pair in pairs], torch.float32),
        prompt=tensor([number for number, _, _ in pairs], torch.long),
    )


def to_ranking_tensors(groups: Sequence[Group], device: torch.device) -> RankingTensors:
    """The rankings of all groups."""
    rankings = list(_numbered((group, group.rankings) for group in groups))
    tiers = [
        [(base + number, tier) for tier, ids in enumerate(ranking.tiers) for number in ids]
        for _, base, ranking in rankings
    ]
    table = pad_sequence([torch.tensor(row) for row in tiers], batch_first=True, padding_value=-1)
    scores = [
        torch.tensor(ranking.scores or [math.nan] * len(row), dtype=torch.float32)
        for (_, _, ranking), row in zip(rankings, tiers, strict=True)
    ]
    tensors = (
        table[..., 0].clamp(min=0),
        table[..., 1],
        pad_sequence(scores, batch_first=True, padding_value=math.nan),
        torch.tensor([ranking.weight for _, _, ranking in rankings]),
        torch.tensor([number for number, _, _ in rankings]),
    )
    return RankingTensors(*(send(tensor, device) for tensor in tensors))


def to_pointwise_tensors(groups: Sequence[Group], device: torch.device) -> PointwiseTensors:
    """The pointwise judgments of all groups."""
    judgments = list(_numbered((group, group.pointwise) for group in groups))
    signs = [1.0 if judgment.is_good else -1.0 for _, _, judgment in judgments]
    tensors = (
        torch.tensor([base + judgment.response for _, base, judgment in judgments]),
        torch.tensor(signs),
        torch.tensor([judgment.weight for _, _, judgment in judgments]),
        torch.tensor([number for number, _, _ in judgments]),
    )
    return PointwiseTensors(*(send(tensor, device) for tensor in tensors))


def _numbered(
    judged: Iterator[tuple[Group, tuple[Judgment, ...]]],
) -> Iterator[tuple[int, int, Judgment]]:
    """Number of the group, number of its first response over all groups, and each judgment."""
    start = 0
    for number, (group, judgments) in enumerate(judged):
        yield from ((number, start, judgment) for judgment in judgments)
        start += len(group.responses)
