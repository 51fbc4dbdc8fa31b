"""The formulas of PPO, in the order of a step: rewards, advantages, losses, KL estimators.

Pure functions of tensors. Letters: B sequences, R response tokens, M reference outputs of a prompt,
P prompts, K responses to each or tokens at each position. Masks are True at real tokens. Losses and
KLs of tokens are sums; the caller divides by the number of real tokens of all ranks and
micro-batches, so that neither changes the result.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Shaping = Literal["centered", "par", "none"]

MAX_LOG_RATIO = 10.0
MIN_TAIL = 1e-6  # probability; float32 rounding errors dominate below it


# Rewards: from the scores of responses to the reward of each token


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
    """Shaped reward, and the prompt baseline that was subtracted from it.

    `centered` subtracts the prompt's mean reference reward so that `limit` clips the gain, not the
    raw score. `Scores.for_advantages` adds it back, because every advantage estimator removes a
    constant of the prompt anyway.

    Args:
        scores: of the responses.
        reference_scores: of the reference outputs of the same prompts.
        finished: False where a response ran into the length limit.
        lengths: in tokens.
        shaping: centered, PAR or neither; the rest follows after it.
        missing_eos_penalty: subtracted from the reward of responses cut at the length limit.
        missing_eos_reward: what they earn instead, whatever their score; None leaves the penalty.
        length_penalty: subtracted for every token.
        limit: the result is clipped to ± this; None is no limit.

    Returns:
        Shaped rewards and prompt baselines; their sum is what the critic predicts.
    """
    shaped, prompt_baseline = scores, torch.zeros_like(scores)
    if shaping == "centered":
        shaped = center(scores, reference_scores)
        prompt_baseline = scores - shaped
    elif shaping == "par":
        shaped = preference(scores, reference_scores)
    if missing_eos_reward is None:
        shaped = penalize_missing_eos(shaped, finished, missing_eos_penalty)
    else:
        shaped = shaped.where(finished, missing_eos_reward)
    shaped = shaped - length_penalty * lengths
    return shaped if limit is None else shaped.clamp(-limit, limit), prompt_baseline


def center(
    scores: Float[Tensor, " B"], reference_scores: Float[Tensor, "B M"]
) -> Float[Tensor, " B"]:
    """r(y*) − mean_M r(y0): what the response is worth beyond the original model's responses."""
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


# Advantages: how much better a token did than the critic predicted, or a response than the other
# samples of its prompt


def generalized_advantages(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16).

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


# Losses of policy and critic


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


# KL estimators; k1 and k3: Schulman, "Approximating KL Divergence" (2020)


def forward_kl_k3(
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    response_mask: Bool[Tensor, "B R"],
) -> Float[Tensor, ""]:
    """KL(reference ‖ policy) on the reference's own responses: Σ r − 1 − log r, r = π_θ/π_ref.

    Never negative; unbiased, and so is its gradient, which is 0 at π_θ = π_ref, except where log r
    is clamped: from above, to 10, since one token that the policy likes e^10 times better must not
    dominate the gradient. It is not clamped from below: as log r → −∞ the slope tends to −1, which
    pulls back tokens that the policy has abandoned. (k3: Schulman 2020, "Approximating KL
    divergence", with the roles of the two models exchanged.)
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

    Σ_v p_v log(p_v / q_v) over the reference's K most likely tokens and, as one bucket more, all
    the others; p is the reference, q the policy. Never negative, and does not depend on
    which token was sampled. What differs within the bucket does not count: a lower bound, exact for
    K = V.
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


FORWARD_KL = {  # by --kl.estimator: the metric, and the sum over real tokens
    "k3": ("kl/forward_k3_per_token", forward_kl_k3),
    "k1": ("kl/forward_k1_per_token", forward_kl_k1),
    "top_k": ("kl/forward_top_k_per_token", forward_kl_top_k),
    "token_reverse": ("kl/token_reverse_per_token", token_reverse_kl),
}
