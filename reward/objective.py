"""What a step minimises: the chosen loss over the judgements of some prompts, as one number.

Pairs, or whole rankings, and pointwise judgements (thumbs, "all bad") are averaged apart within a
prompt, so that each of the two counts once for a prompt, times its weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reward.data.groups import Group, Pair, Pointwise, TieredRanking
from reward.losses import (
    bradley_terry,
    plackett_luce,
    pointwise,
    rank_targets,
    regression,
    sum_of_prompt_means,
)
from reward.settings import Loss, RewardSettings

Judgement = TypeVar("Judgement", Pair, TieredRanking, Pointwise)


@dataclass(frozen=True)
class Objective:
    """Which loss, the margin per step of strength, and the weight of the centering penalty."""

    loss: Loss = "bradley_terry"
    margin: float = 0.0
    centering: float = 0.0

    @classmethod
    def of(cls, settings: RewardSettings) -> "Objective":
        """What these settings minimise."""
        return cls(settings.loss, settings.objective.margin, settings.objective.centering)

    def judgements(self, group: Group) -> list[Sequence[Pair | TieredRanking | Pointwise]]:
        """What the loss averages in a group: its pairs or rankings, its pointwise judgements.

        Those that it has.
        """
        compared = group.pairs if self.loss == "bradley_terry" else group.rankings
        return [found for found in (compared, group.pointwise) if found]


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


@dataclass(frozen=True)
class PointwiseTensors:
    """The pointwise judgements of several groups; `sign` is 1 for good and −1 for bad."""

    response: Int[Tensor, " T"]
    sign: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    prompt: Int[Tensor, " T"]


def sum_of_losses(
    objective: Objective,
    groups: Sequence[Group],
    rewards: Float[Tensor, " N"],
    thresholds: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, ""]:
    """Add up the loss of every prompt.

    Divided by `total_weight` of the whole batch it is what a step minimises.

    Args:
        objective: which loss.
        groups: prompts with their judgements.
        rewards: of their responses, in order.
        thresholds: b of their pointwise judgements, in order; may be left out where there are none.
    """
    if not groups:
        return rewards.sum()  # 0, but the backward pass needs it
    parts = []
    if any(group.pairs for group in groups):
        parts.append(_sum_of_comparisons(objective, groups, rewards))
    if any(group.pointwise for group in groups):
        assert thresholds is not None
        said = to_pointwise_tensors(groups, rewards.device)
        losses = pointwise(rewards[said.response], said.sign, thresholds.to(rewards.device))
        parts.append(sum_of_prompt_means(losses, said.weight, said.prompt))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _sum_of_comparisons(
    objective: Objective, groups: Sequence[Group], rewards: Float[Tensor, " N"]
) -> Float[Tensor, ""]:
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
    if objective.centering:
        squares = (first + second).square()
        total = total + objective.centering * sum_of_prompt_means(
            squares, pairs.weight, pairs.prompt
        )
    return total


def total_weight(objective: Objective, groups: Sequence[Group]) -> float:
    """What `sum_of_losses` of a whole batch is divided by: Σ_x (Σ_j w_j) / n_x.

    That is the number of prompts where all weights are 1, those with pairs and those with pointwise
    judgements counted apart. Every process knows the whole batch, so all agree on it.
    """
    judged = (found for group in groups for found in objective.judgements(group))
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


def to_pointwise_tensors(groups: Sequence[Group], device: torch.device) -> PointwiseTensors:
    """The pointwise judgements of all groups, with responses numbered as `lay_out` lays them."""
    found = list(_numbered((group, group.pointwise) for group in groups))
    signs = [1.0 if one.is_good else -1.0 for _, _, one in found]
    return PointwiseTensors(
        response=torch.tensor([base + one.response for _, base, one in found], device=device),
        sign=torch.tensor(signs, device=device),
        weight=torch.tensor([one.weight for _, _, one in found], device=device),
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
