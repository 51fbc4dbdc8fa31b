"""Reward shaping: from the reward model's score to the reward of each token.

Letters: B sequences, R response tokens, M stored references per prompt.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def center(
    scores: Float[Tensor, " B"], reference_scores: Float[Tensor, "B M"]
) -> Float[Tensor, " B"]:
    """r(y*) − mean_M r(y0): what the response is worth beyond the original model's answers."""
    return scores - reference_scores.mean(dim=1)


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
