"""Advantages: how much better a token was than the critic, or a response than others, let expect.

Letters: B sequences, R response tokens, P prompts, K responses to each.
Masks are True at real tokens.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def generalized_advantages(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γλ A_{t+1},  return_t = A_t + V_t; the value after
    the last real token is 0, for a response that was cut at the length limit too: the episode
    ends there.

    Args:
        rewards: reward of each token.
        values: the critic's value before each token.
        response_mask: True at real tokens, which must be a prefix of each row.
        gamma: discount per token.
        gae_lambda: λ.

    Returns:
        Advantages and returns, 0 at padding.
    """
    mask = response_mask.to(values.dtype)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * gae_lambda * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = next_advantage
    return advantages, (advantages + values) * mask


def leave_one_out(rewards: Float[Tensor, "P K"]) -> Float[Tensor, "P K"]:
    """RLOO (arXiv 2402.14740, eq. 8): r_i − mean_{j≠i} r_j over K ≥ 2 responses to each prompt."""
    samples = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * samples / (samples - 1)


def group_relative(rewards: Float[Tensor, "P K"], *, scale: bool) -> Float[Tensor, "P K"]:
    """GRPO (arXiv 2402.03300, section 4.1.2): (r − mean) / (std + 1e-4) of each prompt's responses.

    The standard deviation is the unbiased one. Without `scale` there is no division (arXiv
    2503.20783): prompts on which all responses are alike then count for little.
    """
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    return centered / (rewards.std(dim=1, keepdim=True) + 1e-4) if scale else centered


def whiten(
    values: Float[Tensor, "B R"], response_mask: Bool[Tensor, "B R"], mean: float, variance: float
) -> Float[Tensor, "B R"]:
    """Shift and scale real tokens by a mean and a biased variance; padding becomes 0.

    (x − μ) / √(σ² + 1e-8), where μ and σ² come from the real tokens of all ranks.
    """
    scale: float = (variance + 1e-8) ** -0.5
    return (values - mean) * scale * response_mask


def masked_moments(
    values: Float[Tensor, "B R"], response_mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "3"]:
    """Count, sum and sum of squares over real tokens, to be added up over ranks."""
    real = values[response_mask].double()
    return torch.stack([torch.tensor(float(real.numel())).to(real), real.sum(), (real**2).sum()])
