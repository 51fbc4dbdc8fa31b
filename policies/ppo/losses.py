"""PPO's losses, as sums over real tokens.

Every loss returns a sum; the caller divides by the number of real tokens of all ranks and
micro-batches, so that neither changes the result. Letters: B sequences, R response tokens.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def policy_loss(
    log_probs: Float[Tensor, "B R"],
    old_log_probs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    weights: Float[Tensor, "B R"] | None = None,
) -> Float[Tensor, ""]:
    """Clipped surrogate (arXiv 1707.06347, eq. 7).

    Σ w max(−A ρ, −A clip(ρ, 1 − ε, 1 + ε_high)), ρ = π/π_old.

    Args:
        log_probs: of the policy that is trained.
        old_log_probs: of the policy at the start of the step.
        advantages: A.
        response_mask: the tokens that count.
        clip_range: ε.
        clip_range_high: ε_high, ε when not given (clip-higher, arXiv 2503.14476, section 3.1).
        dual_clip: c > 1; where A < 0 the loss of a token is at most −A c (dual clip, arXiv
            1912.09729), however large ρ is.
        weights: w, 1 when not given; see `sampler_weights`.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    high = clip_range if clip_range_high is None else clip_range_high
    clipped = ratio.clamp(1 - clip_range, 1 + high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        bounded = torch.minimum(loss, -advantages * dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    if weights is not None:
        loss = loss * weights
    return (loss * response_mask).sum()


def sampler_weights(
    log_probs: Float[Tensor, "B R"], sampler_log_probs: Float[Tensor, "B R"], cap: float
) -> Float[Tensor, "B R"]:
    """Truncated importance weights of tokens that another program sampled: min(π/μ, cap).

    π is the trainer's policy at the start of the step, μ what the sampler says it sampled from. A
    gradient weighted by π/μ is that of samples from π; the cap bounds its variance (Ionides 2008,
    "Truncated importance sampling").
    """
    return torch.exp(log_probs - sampler_log_probs).clamp(max=cap)


def matches_sampler(
    log_probs: Float[Tensor, "B R"],
    sampler_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
    cap: float,
) -> Bool[Tensor, " B"]:
    """Whether the geometric mean of a response's ratios π/μ lies within 1/cap to cap.

    exp(1/T Σ_t log π − log μ) over its T real tokens: a gap for each token, whatever the length.
    """
    gaps = ((log_probs - sampler_log_probs) * response_mask).sum(dim=1)
    return (gaps / response_mask.sum(dim=1)).abs() <= math.log(cap)


def value_loss(
    values: Float[Tensor, "B R"],
    old_values: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
    clip_range: float,
) -> Float[Tensor, ""]:
    """Clipped value loss: Σ ½ max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)."""
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return (loss * response_mask).sum()


def approximate_kl(
    log_probs: Float[Tensor, "B R"],
    old_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """How far one update has moved the policy: Σ ½ (Δ log-prob)²."""
    return (0.5 * (log_probs - old_log_probs) ** 2 * response_mask).sum()


def clipped_tokens(
    log_probs: Float[Tensor, "B R"],
    old_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
    clip_range: float,
    clip_range_high: float | None = None,
) -> Float[Tensor, ""]:
    """How many real tokens have a ratio outside 1 − ε to 1 + ε_high."""
    change = torch.exp(log_probs - old_log_probs) - 1
    high = clip_range if clip_range_high is None else clip_range_high
    return (((change > high) | (change < -clip_range)) & response_mask).sum().float()
