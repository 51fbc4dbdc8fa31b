"""Attention on CPUs in plain matrix products, faster than the fused kernel, above all backward.

`use_products` registers it with transformers as the attention `products`. Letters: B rows, H heads,
G key-value heads (G ≤ H), D head size, Q queries, S keys.
"""

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PRODUCTS = "products"
LONGEST = 256  # keys; the backward pass keeps all scores, too many for memory in long rows
MANY_KEYS = 512  # in all rows; with more, the fused kernel is slower for one query in bf16


def use_products(model: PreTrainedModel) -> None:
    """Switch a model to matrix products instead of the fused kernel, on CPUs."""
    if model.config._attn_implementation == "sdpa" and not torch.cuda.is_available():
        ALL_ATTENTION_FUNCTIONS.register(PRODUCTS, product_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PRODUCTS, sdpa_mask)
        model.set_attn_implementation(PRODUCTS)


def product_attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    attention_mask: Bool[Tensor, "B 1 Q S"] | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Float[Tensor, "B Q H D"], None]:
    """Attention as transformers calls it: causal without a mask; fused for long rows.

    A single query in bf16, as in sampling, is fused only for few keys: the fused kernel takes half
    as long for one row of 40 keys, but 1.9 to 3 times as long for 32 rows of 40 to 600.
    """
    (rows, _, queries, _), keys = query.shape, key.shape[2]
    is_sampling = queries == 1 and value.dtype != torch.float32 and rows * keys > MANY_KEYS
    is_fused = not is_sampling and (queries == 1 or keys > LONGEST)
    if query.device.type != "cpu" or is_fused or rest.get("dropout"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast only projections give the lower precision; rotation brings back float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if is_sampling:
        attended = single_query_attention(query, key, value, scale, attention_mask)
        return attended.transpose(1, 2), None
    hidden = future(queries, query.device) if attention_mask is None else ~attention_mask[:, 0]
    return tail_attention(query, key, value, scale, hidden).transpose(1, 2), None


def single_query_attention(
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    scale: float,
    seen: Bool[Tensor, "B 1 1 S"] | None,
) -> Float[Tensor, "B H 1 D"]:
    """softmax(scale·q·kᵀ + mask)·v for one query of each row, which sees the keys `seen`."""
    batch, groups, keys, size = key.shape
    folded = query.reshape(batch * groups, -1, size)
    k, v = (x.reshape(batch * groups, keys, size) for x in (key, value))
    scores = torch.bmm(folded, k.mT).mul_(scale)
    if seen is not None:
        by_row = scores.view(batch, -1, 1, keys)
        by_row.masked_fill_(~seen, torch.finfo(scores.dtype).min)
    return torch.bmm(scores.softmax(dim=-1), v).view(query.shape)


@lru_cache(maxsize=64)
def future(queries: int, device: torch.device) -> Bool[Tensor, "1 Q Q"]:
    """The causal mask of the queries' own keys, True where a key is hidden."""
    return torch.ones(1, queries, queries, dtype=torch.bool, device=device).triu(1)


def tail_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    scale: float,
    hidden: Bool[Tensor, "B Q M"],
) -> Float[Tensor, "B H Q D"]:
    """softmax(scale·q·kᵀ + mask)·v; what a query does not see among the last M keys is `hidden`.

    Every query sees all keys before the last M. One that sees none, which is padding, gets the mean
    of all values. `hidden` may have one row for all.
    """
    attended: Tensor = _TailAttention.apply(query, key, value, scale, hidden)  # type: ignore[no-untyped-call]
    return attended


class _TailAttention(torch.autograd.Function):
    """Written by hand to mask scores in place and multiply heads that share keys in one product."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor
    ) -> Tensor:
        batch, heads, queries, size = query.shape
        groups, keys = key.shape[1:3]
        rows = heads // groups * queries
        folded = (query * scale).reshape(batch * groups, rows, size)
        k, v = (x.reshape(batch * groups, keys, size) for x in (key, value))
        scores = torch.bmm(folded, k.mT)
        last = scores.view(batch, heads, queries, keys)[..., keys - hidden.shape[2] :]
        last.masked_fill_(hidden[:, None], torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(folded, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v).view(batch, heads, queries, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        folded, k, v, weights = ctx.saved_tensors
        batch, heads, queries, size = gradient.shape
        gradient = gradient.reshape(folded.shape)
        by_value = torch.bmm(weights.mT, gradient)
        by_weights = torch.bmm(gradient, v.mT)
        by_scores = torch.ops.aten._softmax_backward_data(by_weights, weights, -1, weights.dtype)
        by_query = torch.bmm(by_scores, k).mul_(ctx.scale).view(batch, heads, queries, size)
        by_key = torch.bmm(by_scores.mT, folded)
        shape = (batch, -1, k.shape[1], size)
        return by_query, by_key.view(shape), by_value.view(shape), None, None
