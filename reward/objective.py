"""What a step minimises: the chosen loss over the judgements of some prompts, as one number."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reward.groups import Group, Pair, TieredRanking
from reward.losses import (
    bradley_terry,
    plackett_luce,
    rank_targets,
    regression,
    sum_of_prompt_means,
)
from reward.settings import Loss, RewardSettings

Judgement = TypeVar("Judgement", Pair, TieredRanking)


@dataclass(frozen=True)
class Objective:
    """Which loss, the margin per step of strength, and the weight of the centring penalty."""

    loss: Loss = "bradley_terry"
    margin: float = 0.0
    centring: float = 0.0

    @classmethod
    def of(cls, settings: RewardSettings) -> "Objective":
        """What these settings minimise."""
        return cls(settings.loss, settings.margin, settings.centring)

    def judgements(self, group: Group) -> Sequence[Pair | TieredRanking]:
        """What the loss counts in a group: its pairs, or its rankings."""
        return group.pairs if self.loss == "bradley_terry" else group.rankings


@dataclass(frozen=True)
class PairTensors:
    """The pairs of several groups; `first` and `second` number the responses over all groups."""

    first: Int[Tensor, " P"]
    second: Int[Tensor, " P"]
    outcome: Float[Tensor, " P"]
    strength: Float[Tensor, " P"]
    weight: Float[Tensor, " P"]
    prompt: Int[Tensor, " P"]


@dataclass(frozen=True)
class RankingTensors:
    """The rankings of several groups; `tier` is 0 for the best, -1 where a row has no response.

    `score` is NaN where none was given.
    """

    response: Int[Tensor, "M K"]
    tier: Int[Tensor, "M K"]
    score: Float[Tensor, "M K"]
    weight: Float[Tensor, " M"]
    prompt: Int[Tensor, " M"]


def sum_of_losses(
    objective: Objective, groups: Sequence[Group], rewards: Float[Tensor, " N"]
) -> Float[Tensor, ""]:
    """Add up the loss of every prompt; rewards in the order of groups and their responses.

    Divided by `total_weight` of the whole batch it is what a step minimises.
    """
    if not groups:
        return rewards.sum()  # 0, but the backward pass needs it
    pairs = to_pair_tensors(groups, rewards.device)
    first, second = rewards[pairs.first], rewards[pairs.second]
    if objective.loss == "bradley_terry":
        losses = bradley_terry(first, second, pairs.outcome, pairs.strength * objective.margin)
        total = sum_of_prompt_means(losses, pairs.weight, pairs.prompt)
    else:
        rankings = to_ranking_tensors(groups, rewards.device)
        chosen = rewards[rankings.response]
        if objective.loss == "plackett_luce":
            losses = plackett_luce(chosen, rankings.tier)
        else:
            ranks = rank_targets(rankings.tier)
            targets = torch.where(rankings.score.isnan(), ranks, rankings.score)
            losses = regression(chosen, targets, rankings.tier >= 0)
        total = sum_of_prompt_means(losses, rankings.weight, rankings.prompt)
    if objective.centring:
        squares = (first + second).square()
        total = total + objective.centring * sum_of_prompt_means(
            squares, pairs.weight, pairs.prompt
        )
    return total


def total_weight(objective: Objective, groups: Sequence[Group]) -> float:
    """What `sum_of_losses` of a whole batch is divided by: Σ_x (Σ_j w_j) / n_x.

    That is the number of prompts where all weights are 1. Every process knows the whole batch, so
    all agree on it.
    """
    judged = (objective.judgements(group) for group in groups)
    return math.fsum(math.fsum(one.weight for one in found) / len(found) for found in judged)


def to_pair_tensors(groups: Sequence[Group], device: torch.device) -> PairTensors:
    """The pairs of all groups, with responses numbered as `lay_out` lays them."""
    found = list(_numbered((group, group.pairs) for group in groups))

    def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return PairTensors(
        first=tensor([base + pair.first for _, base, pair in found], torch.long),
        second=tensor([base + pair.second for _, base, pair in found], torch.long),
        outcome=tensor([pair.outcome for _, _, pair in found], torch.float32),
        strength=tensor([pair.strength for _, _, pair in found], torch.float32),
        weight=tensor([pair.weight for _, _, pair in found], torch.float32),
        prompt=tensor([number for number, _, _ in found], torch.long),
    )


def to_ranking_tensors(groups: Sequence[Group], device: torch.device) -> RankingTensors:
    """The rankings of all groups, with responses numbered as `lay_out` lays them."""
    found = list(_numbered((group, group.rankings) for group in groups))
    tiers = [
        [(base + number, tier) for tier, ids in enumerate(ranking.tiers) for number in ids]
        for _, base, ranking in found
    ]
    table = pad_sequence([torch.tensor(row) for row in tiers], batch_first=True, padding_value=-1)
    scores = [
        torch.tensor(ranking.scores or [math.nan] * len(row), dtype=torch.float32)
        for (_, _, ranking), row in zip(found, tiers, strict=True)
    ]
    return RankingTensors(
        response=table[..., 0].clamp(min=0).to(device),
        tier=table[..., 1].to(device),
        score=pad_sequence(scores, batch_first=True, padding_value=math.nan).to(device),
        weight=torch.tensor([ranking.weight for _, _, ranking in found], device=device),
        prompt=torch.tensor([number for number, _, _ in found], device=device),
    )


def _numbered(
    judged: Iterator[tuple[Group, tuple[Judgement, ...]]],
) -> Iterator[tuple[int, int, Judgement]]:
    """Number of the group, number of its first response over all groups, and each judgement."""
    start = 0
    for number, (group, judgements) in enumerate(judged):
        yield from ((number, start, judgement) for judgement in judgements)
        start += len(group.responses)
