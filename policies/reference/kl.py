"""KL estimators between policy and reference, as sums over real tokens.

Every function takes log-probs and a response mask (True is a real token). Estimators k1 and k3:
Schulman, "Approximating KL Divergence" (2020).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 10.0
MIN_TAIL = 1e-6  # probability; float32 rounding errors dominate below it


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


FORWARD_KL = {  # by --kl.estimator: the metric, and the sum over real tokens
    "k3": ("kl/forward_k3_per_token", forward_kl_k3),
    "k1": ("kl/forward_k1_per_token", forward_kl_k1),
    "top_k": ("kl/forward_top_k_per_token", forward_kl_top_k),
    "token_reverse": ("kl/token_reverse_per_token", token_reverse_kl),
}
