"""Log-probabilities of chosen tokens without logits of the whole vocabulary in memory.

A row of logits is as long as the vocabulary, so those of a micro-batch can need more memory than
its activations. Here float32 logits of one block of the vocabulary at a time are computed from the
hidden states; the backward pass computes them again. Logits that a model has returned are read in
the same way.

Letters: N positions, d hidden size, V vocabulary, K tokens looked up at each position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.modeling.logits.projection import float32_block

BLOCK_ELEMENTS = 2**23  # float32 logits that exist at one time
SMALLEST_BLOCK, LARGEST_BLOCK = 512, 4096  # tokens of the vocabulary
IMPOSSIBLE = -1e30  # in place of −∞, since 0 · −∞ is not a number
LARGEST_GAP = -1e4  # between logits: its exponential is 0 already, and sums of it stay finite

Blocks = Iterator[tuple[int, Float[Tensor, "N v"]]]  # the first token of a block, and its logits


@dataclass(frozen=True)
class Distributions:
    """softmax(z / τ) at N positions; the logits z are h Wᵀ + b, or given.

    Attributes:
        hidden: h, what the output layer reads; without a `weight`, z itself.
        weight: the output matrix.
        bias: of the output layer.
        dtype: precision of the factors; sums and logits are float32.
    """

    hidden: Float[Tensor, "N d"]
    weight: Float[Tensor, "V d"] | None = None
    bias: Float[Tensor, " V"] | None = None
    dtype: torch.dtype = torch.float32

    def blocks(self) -> Blocks:
        """The logits, block by block; the caller may overwrite them."""
        size, rows = block_size(len(self.hidden)), len(self.hidden)
        if self.weight is None:
            for number, part in enumerate(self.hidden.split(size, dim=1)):
                yield number * size, part.float().clamp(min=IMPOSSIBLE)
            return
        factors = self.hidden.to(self.dtype) if self.hidden.is_cuda else self.hidden.float()
        buffer = self.hidden.new_empty(rows * size, dtype=torch.float32)
        for first in range(0, len(self.weight), size):
            part = self.weight[first : first + size]
            block = buffer[: rows * len(part)].view(rows, len(part))
            float32_block(factors, part, self.dtype, block)
            if self.bias is not None:
                block.add_(self.bias[first : first + size])
            yield first, block


@dataclass(frozen=True)
class Statistics:
    """Statistics of the distributions at N positions, in nats."""

    log_probs: Float[Tensor, "N K"]
    log_sum_exp: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]


class Sums:
    """Adds up log-probs, log-sum-exps and entropies over the blocks of the vocabulary.

    Each block has m = max z/τ, s = Σ e^(z/τ − m) and t = Σ (z/τ − m) e^(z/τ − m). With M = max m,
    log Σ e^(z/τ) = M + log Σ s e^(m − M) over all blocks, and the entropy is that minus the mean of
    z/τ, which follows from t.

    Args:
        ids: tokens to look up.
        scale: τ.
    """

    def __init__(self, ids: Int[Tensor, "N K"], scale: float) -> None:
        self.ids, self.scale = ids, scale
        self.chosen = torch.zeros(ids.shape, device=ids.device)
        self.blocks: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, first: int, block: Float[Tensor, "N v"]) -> None:
        """Add the block that starts with token `first`; overwrites it."""
        block.div_(self.scale)
        columns = self.ids - first
        inside = (columns >= 0) & (columns < block.shape[1])
        logits = block.gather(1, columns.clamp(0, block.shape[1] - 1))
        self.chosen += torch.where(inside, logits, 0.0)
        top = block.amax(dim=1)
        exponentials = block.sub_(top[:, None]).exp()
        products = torch.linalg.vecdot(exponentials, block)
        self.blocks.append((top, exponentials.sum(dim=1), products))

    def results(self) -> Statistics:
        """The statistics, after the last block."""
        tops, totals, products = (torch.stack(parts) for parts in zip(*self.blocks, strict=True))
        highest = tops.amax(dim=0)
        gaps = (tops - highest).clamp(min=LARGEST_GAP)
        shares = gaps.exp()
        total = (shares * totals).sum(dim=0)
        distances = shares * (products + gaps * totals)
        entropy = total.log() - distances.sum(dim=0) / total
        log_sum_exp = highest + total.log()
        log_probs = self.chosen - log_sum_exp[:, None]
        return Statistics(log_probs, log_sum_exp, entropy.clamp(min=0))


@torch.no_grad()
def statistics(
    distributions: Distributions, ids: Int[Tensor, "N K"], scales: Sequence[float]
) -> list[Statistics]:
    """At each of the temperatures `scales`, in one pass over the vocabulary."""
    all_sums = [Sums(ids, scale) for scale in scales]
    for first, block in distributions.blocks():
        for sums in all_sums[1:]:
            sums.add(first, block.clone())
        all_sums[0].add(first, block)
    return [sums.results() for sums in all_sums]


@torch.no_grad()
def most_likely(distributions: Distributions, k: int) -> Int[Tensor, "N k"]:
    """The k most likely tokens, the most likely first."""
    values: list[Tensor] = []
    ids: list[Tensor] = []
    for first, block in distributions.blocks():
        top = block.topk(min(k, block.shape[1]), dim=1)
        values.append(top.values)
        ids.append(top.indices + first)
    columns = torch.cat(values, dim=1).topk(k, dim=1).indices
    return torch.cat(ids, dim=1).gather(1, columns)


def chosen_log_probs(
    distributions: Distributions, ids: Int[Tensor, "N K"], scale: float
) -> tuple[Float[Tensor, "N K"], Float[Tensor, " N"]]:
    """Log-probs of `ids` at temperature `scale`, and entropies, which have no gradient.

    The backward pass computes each block of logits again.
    """
    function: Any = _ChosenLogProbs.apply  # torch leaves it untyped
    d = distributions
    log_probs, entropy = function(d.hidden, d.weight, d.bias, d.dtype, ids, scale)
    return log_probs, entropy


def block_size(positions: int) -> int:
    """Tokens of the vocabulary in a block."""
    return min(max(BLOCK_ELEMENTS // max(positions, 1), SMALLEST_BLOCK), LARGEST_BLOCK)


class _ChosenLogProbs(torch.autograd.Function):
    """∂ log p_k / ∂z_v = (1[v = k] − p_v) / τ."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        ids: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        (stats,) = statistics(Distributions(hidden, weight, bias, dtype), ids, [scale])
        ctx.save_for_backward(hidden, weight, bias, ids, stats.log_sum_exp)
        ctx.scale, ctx.dtype = scale, dtype
        ctx.mark_non_differentiable(stats.entropy)
        return stats.log_probs, stats.entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, log_sum_exp = ctx.saved_tensors
        result = _Gradients(hidden, weight, bias, ctx.dtype, ctx.needs_input_grad[:3])
        gradient = gradients[0] / ctx.scale
        total = gradient.sum(dim=1, keepdim=True)
        with torch.autocast(hidden.device.type, enabled=False):
            for first, block in Distributions(hidden, weight, bias, ctx.dtype).blocks():
                slopes = block.div_(ctx.scale).sub_(log_sum_exp[:, None]).exp_().mul_(-total)
                columns = ids - first
                inside = (columns >= 0) & (columns < block.shape[1])
                slopes.scatter_add_(1, columns.where(inside, 0), gradient.where(inside, 0.0))
                result.add(slice(first, first + block.shape[1]), slopes)
        return result.hidden(), result.for_weight, result.for_bias, None, None, None


class _Gradients:
    """Computes the gradients of h (or z), W and b from blocks of ∂/∂z."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        needed: tuple[bool, ...],
    ) -> None:
        self.weight, self.dtype, self.input = weight, dtype, hidden
        self.for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
        self.for_weight = torch.empty_like(weight) if needed[1] and weight is not None else None
        self.for_bias = torch.empty_like(bias) if needed[2] and bias is not None else None

    def add(self, tokens: slice, slopes: Tensor) -> None:
        """Add the part of ∂/∂z of some tokens of the vocabulary."""
        if self.weight is None:
            assert self.for_hidden is not None
            self.for_hidden[:, tokens] = slopes
            return
        if self.for_bias is not None:
            self.for_bias[tokens] = slopes.sum(dim=0)
        slopes = slopes.to(self.dtype)
        if self.for_hidden is not None:
            self.for_hidden += slopes @ self.weight[tokens].to(self.dtype)
        if self.for_weight is not None:
            self.for_weight[tokens] = slopes.T @ self.input.to(self.dtype)

    def hidden(self) -> Tensor | None:
        """The gradient of the hidden states, in their precision."""
        return None if self.for_hidden is None else self.for_hidden.to(self.input.dtype)
