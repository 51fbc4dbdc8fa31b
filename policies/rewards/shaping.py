"""Reward shaping: from the reward model's score to the reward of each token.

Letters: B sequences, R response tokens, M stored references per prompt.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Shaping = Literal["centered", "par", "none"]
Combination = Literal["sum", "mean", "worst"]


def combine(
    scores: Float[Tensor, "S B"], weights: Float[Tensor, " S"], combination: Combination
) -> Float[Tensor, " B"]:
    """Several rewards as one: Σ w r, its mean over the S sources, or the lowest w r.

    The worst case of an ensemble is hard to hack: all its members must be fooled at once
    (arXiv 2310.02743).
    """
    weighted = scores * weights[:, None]
    if combination == "worst":
        return weighted.amin(dim=0)
    return weighted.sum(dim=0) if combination == "sum" else weighted.mean(dim=0)


def shape_rewards(
    scores: Float[Tensor, " B"],
    reference_scores: Float[Tensor, "B M"],
    finished: Bool[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    *,
    shaping: Shaping,
    missing_eos_penalty: float = 0.0,
    missing_eos_reward: float | None = None,
    length_penalty: float = 0.0,
    limit: float | None = None,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """What a response earns, and how much of it was taken off as the baseline of its prompt.

    The baseline is known before the response: a critic need not predict it.

    Args:
        scores: of the responses.
        reference_scores: of the stored outputs of the same prompts.
        finished: False where a response ran into the length limit.
        lengths: in tokens.
        shaping: centred, PAR or neither; the rest follows after it.
        missing_eos_penalty: taken from responses that did not end by themselves.
        missing_eos_reward: what they earn instead, whatever their score; None leaves the penalty.
        length_penalty: taken for every token.
        limit: the result is clipped to ± this; None is no limit.

    Returns:
        Shaped rewards and baselines; their sum is what the critic predicts.
    """
    shaped, baseline = scores, torch.zeros_like(scores)
    if shaping == "centered":
        shaped = center(scores, reference_scores)
        baseline = scores - shaped
    elif shaping == "par":
        shaped = preference(scores, reference_scores)
    if missing_eos_reward is None:
        shaped = penalize_missing_eos(shaped, finished, missing_eos_penalty)
    else:
        shaped = shaped.where(finished, missing_eos_reward)
    shaped = shaped - length_penalty * lengths
    return shaped if limit is None else shaped.clamp(-limit, limit), baseline


def center(
    scores: Float[Tensor, " B"], reference_scores: Float[Tensor, "B M"]
) -> Float[Tensor, " B"]:
    """r(y*) − mean_M r(y0): what the response is worth beyond the original model's answers."""
    return scores - reference_scores.mean(dim=1)


def preference(
    scores: Float[Tensor, " B"], reference_scores: Float[Tensor, "B M"]
) -> Float[Tensor, " B"]:
    """PAR (arXiv 2502.18770, eq. 6): mean_M σ(r(y*) − r(y0)).

    How often a Bradley-Terry judge would prefer the response to the stored ones: bounded, and
    flat where the reward model is sure, which is where it is hacked.
    """
    return torch.sigmoid(scores[:, None] - reference_scores).mean(dim=1)


def penalize_missing_eos(
    scores: Float[Tensor, " B"], finished: Bool[Tensor, " B"], penalty: float
) -> Float[Tensor, " B"]:
    """Take `penalty` from responses that ran into the length limit."""
    return scores - penalty * (~finished).to(scores.dtype)


def place_at_end(
    scores: Float[Tensor, " B"], response_mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """Put each score on its last real token; every other token gets 0."""
    rewards = torch.zeros(response_mask.shape, dtype=scores.dtype, device=scores.device)
    last = response_mask.sum(dim=1, keepdim=True) - 1
    return rewards.scatter(1, last, scores[:, None])
