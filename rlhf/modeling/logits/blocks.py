"""Log-probabilities of chosen tokens, read from the vocabulary block by block.

A row of logits is as long as the vocabulary, so a micro-batch of them can outweigh the rest of its
activations. Here they exist for one block of the vocabulary at a time, in float32. They come from
the hidden states, block by block of the output matrix, or from logits that a model has returned.

Letters: N positions, d hidden size, V vocabulary, K tokens looked up at each position.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.modeling.logits.projection import float32_block

BLOCK_ELEMENTS = 2**23  # float32 logits that exist at one time
SMALLEST_BLOCK, LARGEST_BLOCK = 512, 4096  # tokens of the vocabulary
IMPOSSIBLE = -1e30  # stands for a logit of −∞, which has no product with the probability 0

Blocks = Iterator[tuple[int, Float[Tensor, "N v"]]]  # the block's first token and its z / τ


@dataclass(frozen=True)
class Statistics:
    """Of the distributions softmax(z / τ) at N positions."""

    log_probs: Float[Tensor, "N K"]
    log_sum_exp: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]


def log_probs_of_hidden(
    hidden: Float[Tensor, "N d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    ids: Int[Tensor, "N K"],
    scale: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N K"], Float[Tensor, " N"]]:
    """Log-probs of `ids` under softmax((h Wᵀ + b) / τ), and its entropy, which has no gradient.

    The backward pass computes each block of logits again.

    Args:
        hidden: what the output layer reads.
        weight: the output matrix.
        bias: of the output layer.
        ids: tokens to look up.
        scale: τ.
        dtype: precision of the factors; sums and logits are float32.
    """
    function: Any = _LogProbsOfHidden.apply  # torch leaves it untyped
    log_probs, entropy = function(hidden, weight, bias, ids, scale, dtype)
    return log_probs, entropy


def log_probs_of_logits(
    logits: Float[Tensor, "N V"], ids: Int[Tensor, "N K"], scale: float
) -> tuple[Float[Tensor, "N K"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probs of `ids` under softmax(z / τ); its entropy and log-sum-exp, without gradients."""
    function: Any = _LogProbsOfLogits.apply
    log_probs, entropy, log_sum_exp = function(logits, ids, scale)
    return log_probs, entropy, log_sum_exp


def _statistics(blocks: Blocks, ids: Int[Tensor, "N K"]) -> Statistics:
    """One pass over the blocks, which it overwrites.

    With m the largest z / τ of a block, s = Σ e^(z/τ − m) and t = Σ (z/τ − m) e^(z/τ − m): blocks
    add up with weights e^(m − M), M the largest of all, and the entropy is log Σ e^(z/τ) minus the
    mean of z / τ.
    """
    log_probs = torch.zeros(ids.shape, device=ids.device)
    largest, sums, products = [], [], []
    for first, block in blocks:
        places = ids - first
        inside = (places >= 0) & (places < block.shape[1])
        found = block.gather(1, places.clamp(0, block.shape[1] - 1))
        log_probs += torch.where(inside, found, 0.0)
        top = block.amax(dim=1)
        block.sub_(top[:, None])
        exponentials = block.exp()
        largest.append(top)
        sums.append(exponentials.sum(dim=1))
        products.append(torch.linalg.vecdot(exponentials, block))
    tops, totals = torch.stack(largest), torch.stack(sums)
    highest = tops.amax(dim=0)
    shares = (tops - highest).exp()
    total = (shares * totals).sum(dim=0)
    distances = shares * (torch.stack(products) + (tops - highest) * totals)
    entropy = total.log() - distances.sum(dim=0) / total
    log_sum_exp = highest + total.log()
    return Statistics(log_probs - log_sum_exp[:, None], log_sum_exp, entropy.clamp(min=0))


def _slopes(
    first: int,
    block: Float[Tensor, "N v"],
    ids: Int[Tensor, "N K"],
    log_sum_exp: Float[Tensor, " N"],
    gradient: Float[Tensor, "N K"],
) -> Float[Tensor, "N v"]:
    """∂/∂z of a block: Σ_k g_k (1[v = k] − p_v), with g already divided by τ; overwrites it."""
    total = gradient.sum(dim=1, keepdim=True)
    slopes = block.sub_(log_sum_exp[:, None]).exp_().mul_(-total)
    places = ids - first
    inside = (places >= 0) & (places < block.shape[1])
    return slopes.scatter_add_(1, places.where(inside, 0), gradient.where(inside, 0.0))


def block_size(positions: int) -> int:
    """Tokens of the vocabulary in a block."""
    return min(max(BLOCK_ELEMENTS // max(positions, 1), SMALLEST_BLOCK), LARGEST_BLOCK)


def _blocks_of_hidden(
    hidden: Float[Tensor, "N d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    scale: float,
    dtype: torch.dtype,
) -> Blocks:
    size = block_size(len(hidden))
    factors = hidden.to(dtype) if hidden.is_cuda else hidden.float()
    logits = hidden.new_empty(len(hidden) * size, dtype=torch.float32)
    for first in range(0, len(weight), size):
        part = weight[first : first + size]
        block = logits[: len(hidden) * len(part)].view(len(hidden), len(part))
        float32_block(factors, part, dtype, block)
        if bias is not None:
            block.add_(bias[first : first + size])
        yield first, block.div_(scale)


def _blocks_of_logits(logits: Float[Tensor, "N V"], scale: float) -> Blocks:
    size = block_size(len(logits))
    for number, part in enumerate(logits.split(size, dim=1)):
        yield number * size, (part.float() / scale).clamp_(min=IMPOSSIBLE)


class _LogProbsOfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        found = _statistics(_blocks_of_hidden(hidden, weight, bias, scale, dtype), ids)
        ctx.save_for_backward(hidden, weight, bias, ids, found.log_sum_exp)
        ctx.scale, ctx.dtype = scale, dtype
        ctx.mark_non_differentiable(found.entropy)
        return found.log_probs, found.entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, log_sum_exp = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradient = gradients[0] / ctx.scale
        for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        for_weight = torch.empty_like(weight) if needs_weight else None
        for_bias = torch.empty_like(bias) if needs_bias else None
        factors = hidden.to(ctx.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for first, block in _blocks_of_hidden(hidden, weight, bias, ctx.scale, ctx.dtype):
                place = slice(first, first + block.shape[1])
                slopes = _slopes(first, block, ids, log_sum_exp, gradient)
                if for_bias is not None:
                    for_bias[place] = slopes.sum(dim=0)
                slopes = slopes.to(ctx.dtype)
                if for_hidden is not None:
                    for_hidden += slopes @ weight[place].to(ctx.dtype)
                if for_weight is not None:
                    for_weight[place] = slopes.T @ factors
        if for_hidden is not None:
            for_hidden = for_hidden.to(hidden.dtype)
        return for_hidden, for_weight, for_bias, None, None, None


class _LogProbsOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = _statistics(_blocks_of_logits(logits, scale), ids)
        ctx.save_for_backward(logits, ids, found.log_sum_exp)
        ctx.scale = scale
        ctx.mark_non_differentiable(found.entropy, found.log_sum_exp)
        return found.log_probs, found.entropy, found.log_sum_exp

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, log_sum_exp = ctx.saved_tensors
        result = torch.empty_like(logits)
        for first, block in _blocks_of_logits(logits, ctx.scale):
            slopes = _slopes(first, block, ids, log_sum_exp, gradients[0] / ctx.scale)
            result[:, first : first + block.shape[1]] = slopes
        return result, None, None
