"""PPO's losses and the KL estimators, as sums over real tokens.

Every loss returns a sum; the caller divides by the number of real tokens of all ranks and
micro-batches, so that neither changes the result. Letters: B sequences, R response tokens.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 10.0
MIN_TAIL = 1e-6  # probability; below it float32 knows no better


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


def forward_kl_k3(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """KL(reference ‖ policy) on the reference's own responses: Σ r − 1 − log r, r = π_θ/π_ref.

    Never negative, unbiased, with an unbiased gradient that is 0 at π_θ = π_ref. log r is clamped
    from above, to 10: one token that the policy likes e^10 times better must not dominate the
    gradient. It is not clamped from below: as log r → −∞ the slope tends to −1, which pulls
    tokens back that the policy has abandoned. (k3: Schulman 2020, "Approximating KL divergence",
    with the roles of the two models exchanged.)
    """
    log_ratio = (log_probs - reference_log_probs).clamp(max=MAX_LOG_RATIO)
    return ((torch.exp(log_ratio) - 1 - log_ratio) * response_mask).sum()


def forward_kl_k1(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """KL(reference ‖ policy) on the reference's own responses: Σ −log r.

    Unbiased, may be negative; its gradient is that of supervised training on the responses.
    """
    return ((reference_log_probs - log_probs) * response_mask).sum()


def forward_kl_top_k(
    log_probs: Float[Tensor, "B R K"],
    reference_log_probs: Float[Tensor, "B R K"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """KL(reference ‖ policy) of every next token on the reference's own responses.

    Σ_v p_v log(p_v / q_v) over the reference's K likeliest tokens and, as one bucket more, all the
    others; p is the reference, q the policy. Never negative, and free of the noise of which token
    was sampled. What differs within the bucket does not count: a lower bound, exact for K = V.
    """
    kept = (reference_log_probs.exp() * (reference_log_probs - log_probs)).sum(dim=2)
    rest, policy_rest = (
        (1 - known.exp().sum(dim=2)).clamp(min=MIN_TAIL)
        for known in (reference_log_probs, log_probs)
    )
    return ((kept + rest * (rest / policy_rest).log()) * response_mask).sum()


def clamped_tokens(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """Number of real tokens with log r > 10, which k3 and the token-level reverse KL clamp."""
    return (((log_probs - reference_log_probs) > MAX_LOG_RATIO) & response_mask).sum().float()


def abandoned_tokens(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """Number of real tokens with log r < −10, which the policy has all but abandoned; no clamp."""
    return (((log_probs - reference_log_probs) < -MAX_LOG_RATIO) & response_mask).sum().float()


def token_reverse_kl(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """KL(policy ‖ reference) of the next token on the reference's prefixes: Σ r log r − r + 1.

    Never negative and unbiased for each token; the prefixes stay the reference's, so it is not the
    KL of whole responses. log r is clamped from above, to 10; from below the term tends to 1 and
    its gradient, r log r, to 0.
    """
    log_ratio = (log_probs - reference_log_probs).clamp(max=MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    return ((ratio * log_ratio - ratio + 1) * response_mask).sum()


def reverse_kl_k1(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, " B"]:
    """KL(policy ‖ reference) on the policy's own samples, in nats per sequence.

    Σ log π_θ − log π_ref: unbiased, may be negative.
    """
    return ((log_probs - reference_log_probs) * response_mask).sum(dim=1)


def reverse_kl_k3(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, " B"]:
    """KL(policy ‖ reference) on the policy's own samples, in nats per sequence.

    Σ e^{−s} − 1 + s, s = log π_θ − log π_ref: unbiased, never negative, heavy-tailed where the
    reference likes a token much better.
    """
    s = log_probs - reference_log_probs
    return ((torch.exp(-s) - 1 + s) * response_mask).sum(dim=1)


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
