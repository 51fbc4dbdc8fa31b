"""The loss of a step: the losses of the judgments of some prompts, added up to one number.

Differs from InstructGPT (arXiv 2203.02155): ties count as half a win each way, and every judgment
may carry a margin and a weight. Letters, over the prompts of one forward pass: N responses,
P pairs, M rankings of up to K responses, T judgments of single responses (thumbs), J judgments of
any kind.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Objective:
    """Which loss, the margin per step of strength, and the weight of the centering penalty."""

    loss: Literal["bradley_terry", "plackett_luce", "regression"] = "bradley_terry"
    margin: float = 0.0
    centering: float = 0.0


@dataclass(frozen=True)
class PairTensors:
    """Pairs of compared responses. Here and below responses and prompts are given by number."""

    first: Int[Tensor, " P"]
    second: Int[Tensor, " P"]
    outcome: Float[Tensor, " P"]
    strength: Float[Tensor, " P"]
    weight: Float[Tensor, " P"]
    prompt: Int[Tensor, " P"]


@dataclass(frozen=True)
class RankingTensors:
    """Whole rankings. `tier` is 0 for the best, −1 for padding; `score` is NaN where not given."""

    response: Int[Tensor, "M K"]
    tier: Int[Tensor, "M K"]
    score: Float[Tensor, "M K"]
    weight: Float[Tensor, " M"]
    prompt: Int[Tensor, " M"]


@dataclass(frozen=True)
class PointwiseTensors:
    """Judgments of single responses. `sign` is 1 for good and −1 for bad."""

    response: Int[Tensor, " T"]
    sign: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    prompt: Int[Tensor, " T"]


@dataclass(frozen=True)
class Judgments:
    """The judgments on the responses of one forward pass; None for a kind that does not occur.

    `prompts` are numbered below this; `rankings` are only there for the losses that read whole
    rankings.
    """

    prompts: int
    pairs: PairTensors | None = None
    rankings: RankingTensors | None = None
    pointwise: PointwiseTensors | None = None


def sum_of_losses(
    objective: Objective,
    judgments: Judgments,
    rewards: Float[Tensor, " N"],
    thresholds: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, ""]:
    """Add up the losses of all prompts; a step minimizes the sum over `total_weight` of the batch.

    Comparisons (pairs or rankings) and pointwise judgments are averaged separately within a prompt:
    each of the two counts once for a prompt, times its weights.

    Args:
        objective: which loss.
        judgments: of the prompts of this forward pass.
        rewards: of their responses, in order.
        thresholds: b of the pointwise judgments, in order, on the device of the rewards; not needed
            where there are none.
    """
    parts = []
    if judgments.pairs is not None:
        parts.append(_sum_of_comparisons(objective, judgments, judgments.pairs, rewards))
    if judgments.pointwise is not None:
        assert thresholds is not None
        judged = judgments.pointwise
        losses = pointwise(rewards[judged.response], judged.sign, thresholds)
        parts.append(sum_of_prompt_means(losses, judged.weight, judged.prompt, judgments.prompts))
    if not parts:
        return rewards.sum()  # of nothing: 0, from which the backward pass can still start
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _sum_of_comparisons(
    objective: Objective,
    judgments: Judgments,
    pairs: PairTensors,
    rewards: Float[Tensor, " N"],
) -> Float[Tensor, ""]:
    rankings, prompts = judgments.rankings, judgments.prompts
    first, second = rewards[pairs.first], rewards[pairs.second]
    if rankings is None:
        losses = bradley_terry(first, second, pairs.outcome, pairs.strength * objective.margin)
        total = sum_of_prompt_means(losses, pairs.weight, pairs.prompt, prompts)
    else:
        chosen = rewards[rankings.response]
        if objective.loss == "plackett_luce":
            losses = plackett_luce(chosen, rankings.tier)
        else:
            ranks = rank_targets(rankings.tier)
            targets = torch.where(rankings.score.isnan(), ranks, rankings.score)
            losses = regression(chosen, targets, rankings.tier >= 0)
        total = sum_of_prompt_means(losses, rankings.weight, rankings.prompt, prompts)
    if objective.centering:
        squares = (first + second).square()
        total = total + objective.centering * sum_of_prompt_means(
            squares, pairs.weight, pairs.prompt, prompts
        )
    return total


def bradley_terry(
    first: Float[Tensor, " P"],
    second: Float[Tensor, " P"],
    outcome: Float[Tensor, " P"],
    margin: Float[Tensor, " P"],
) -> Float[Tensor, " P"]:
    """Negative log-likelihood of each judgment under Bradley and Terry (1952).

    −t·log σ(d − m) − (1 − t)·log σ(−d − m) with d = first − second; a tie (t = ½, m = 0) is half a
    win each way.

    Args:
        first: reward of the response named first.
        second: reward of the other one.
        outcome: t, 1 where first won, ½ for a tie, 0 where second won.
        margin: m ≥ 0, by how much the winner should lead (arXiv 2307.09288, 3.2.2); 0 for ties.
    """
    difference = first - second
    won = logsigmoid(difference - margin)
    lost = logsigmoid(-difference - margin)
    return -outcome * won - (1 - outcome) * lost


def pointwise(
    rewards: Float[Tensor, " T"], sign: Float[Tensor, " T"], threshold: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Negative log-likelihood of judgments of single responses: −log σ(±(r − b)).

    Bradley and Terry's model of a pair, with b in the place of the other response's reward.

    Args:
        rewards: r, the reward of the response.
        sign: 1 where it was called good, −1 where bad.
        threshold: b of the judgment's source, at which good and bad are equally likely.
    """
    return -logsigmoid(sign * (rewards - threshold))


def plackett_luce(rewards: Float[Tensor, "M K"], tier: Int[Tensor, "M K"]) -> Float[Tensor, " M"]:
    """Negative log-likelihood of each ranking under Plackett (1975) and Luce (1959).

    The best tier is chosen first, then the next from what is left. For tier D of d responses and
    everything S not chosen before it: Σ_{i∈D} −r_i + Σ_{l<d} log(Σ_S exp r − (l/d)·Σ_D exp r),
    which is Efron's (1977) form for ties; with one response a tier it is exact, and with two
    responses it is Bradley-Terry.

    Args:
        rewards: reward of every response of every ranking.
        tier: tier of every response, 0 the best; −1 where there is none.
    """
    mine, other = tier.unsqueeze(2), tier.unsqueeze(1)  # (M, K, 1), (M, 1, K)
    real = tier >= 0
    hidden = torch.finfo(rewards.dtype).min
    everyone = rewards.unsqueeze(1).expand(-1, tier.shape[1], -1)
    left = everyone.masked_fill(other < mine, hidden).logsumexp(dim=2)
    same = other == mine
    tied = everyone.masked_fill(~same, hidden).logsumexp(dim=2)
    before_me = same.long().tril(-1).sum(dim=2)
    part = before_me.to(rewards.dtype) / same.sum(dim=2)
    terms = left + torch.log1p(-part * (tied - left).exp()) - rewards
    return terms.masked_fill(~real, 0).sum(dim=1)


def rank_targets(tier: Int[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    """Scores from −1 (worst) to 1 (best) by rank; tied responses share the middle of their ranks.

    1 − 2·(better + (tied − 1)/2) / (ranked − 1), and 0 where only one response is ranked.
    """
    mine, other = tier.unsqueeze(2), tier.unsqueeze(1)
    real = tier >= 0
    better = ((other < mine) & real.unsqueeze(1)).sum(dim=2)
    tied = (other == mine).sum(dim=2)
    ranked = real.sum(dim=1, keepdim=True)
    middle = better + (tied - 1) / 2
    return (1 - 2 * middle / (ranked - 1).clamp(min=1)).masked_fill(~real | (ranked < 2), 0)


def regression(
    rewards: Float[Tensor, "M K"], targets: Float[Tensor, "M K"], mask: Bool[Tensor, "M K"]
) -> Float[Tensor, " M"]:
    """Mean squared difference between rewards and given scores, over the responses of each ranking.

    Args:
        rewards: reward of every response of every ranking.
        targets: the score it should get.
        mask: True where there is a response.
    """
    squares = (rewards - targets).square().masked_fill(~mask, 0)
    return squares.sum(dim=1) / mask.sum(dim=1)


def sum_of_prompt_means(
    losses: Float[Tensor, " J"],
    weights: Float[Tensor, " J"],
    prompt: Int[Tensor, " J"],
    prompts: int,
) -> Float[Tensor, ""]:
    """Add up, over prompts, the mean of its judgments' weighted losses.

    Σ_x (Σ_j w_j·l_j) / n_x, j over the n_x judgments of prompt x: with weights of 1 a prompt
    counts once, however many judgments it has. Divide by Σ_x (Σ_j w_j) / n_x of the whole batch,
    over all forward passes and processes, which is then the number of prompts: arXiv 2203.02155,
    equation 1. Weights do not cancel where all judgments of a prompt have the same one.

    Args:
        losses: loss of each judgment.
        weights: weight of each judgment.
        prompt: number of the prompt that each judgment belongs to.
        prompts: how many prompts there may be.
    """
    counts = weights.new_zeros(prompts).index_add(0, prompt, torch.ones_like(weights))
    return (losses * weights / counts[prompt]).sum()
