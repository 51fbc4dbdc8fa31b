"""Encode a prompt once for all its responses, and many prompts in one row without padding.

A row is prompt, response, …, response, prompt, response, …; a response sees its own prompt and
itself, nothing else, and its positions go on from the prompt's. K responses to a prompt of P tokens
cost P + K·R tokens instead of K·(P + R), and give the same rewards and gradients. Only attention
knows about it: every other layer works on single tokens.

Registered with transformers as the attention `shared_prefix`, so it serves every architecture that
takes its attention from there. The work is done in plain matrix products: on CPUs they beat the
fused kernel, above all backwards. Letters: T tokens, H heads, G heads with keys of their own
(G ≤ H), D head size, Q queries, S keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from reward.groups import Group
from reward.model import Inputs, Layout, RewardModule, Stretch, last_tokens
from rlhf.tokens import pad_right

ATTENTION = "shared_prefix"
TOLERANCE = 1e-3  # relative to the largest reward
QUERIES_AT_ONCE = 128  # a long prompt goes in blocks: half its square is never computed


def pack(groups: Sequence[Group], pad_id: int) -> Inputs:
    """Lay groups end to end in one row; a single padding token when there are none."""
    ids: list[int] = []
    positions: list[int] = []
    reads: list[int] = []
    for group in groups:
        length = len(group.prompt)
        ids += group.prompt
        positions += range(length)
        end_of_prompt = len(ids) - 1
        for response in group.responses:
            ids += response
            positions += range(length, length + len(response))
            reads.append(len(ids) - 1 if response else end_of_prompt)
    layout = tuple(Stretch(len(g.prompt), tuple(map(len, g.responses))) for g in groups)
    return Inputs(
        torch.tensor([ids or [pad_id]]),
        torch.tensor(reads, dtype=torch.long),
        torch.tensor([positions or [0]]),
        layout or (Stretch(1, ()),),
    )


def shared_prefix_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 G T D"],
    value: Float[Tensor, "1 G T D"],
    attention_mask: Tensor | None,
    layout: Layout | None = None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attention over a packed row, as transformers calls it; plain causal without a layout."""
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast only projections give the lower precision; rotation brings back float32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # (T, heads, D)
    outputs: list[Tensor] = []
    start = 0
    for stretch in layout:
        end = start + stretch.prompt
        outputs += _attend_prompt(q[start:end], k[start:end], v[start:end], scale)
        start, end = end, end + sum(stretch.responses)
        if end > start:
            prompt = slice(start - stretch.prompt, start)
            own = [list(x[start:end].split(stretch.responses)) for x in (q, k, v)]
            outputs += _attend_responses(own, k[prompt], v[prompt], scale)
        start = end
    return torch.cat(outputs).unsqueeze(0), None


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
    """Causal attention of a prompt to itself, by blocks of queries; (P, heads, D) each."""
    found = []
    for start in range(0, len(q), QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, len(q))
        query, key, value = (
            x.transpose(0, 1).unsqueeze(0) for x in (q[start:end], k[:end], v[:end])
        )
        found.append(tail_attention(query, key, value, scale)[0].transpose(0, 1))
    return found


def _attend_responses(
    own: list[list[Tensor]], prompt_key: Tensor, prompt_value: Tensor, scale: float
) -> list[Tensor]:
    """Attention of each response to the prompt and itself; padding at the end changes nothing."""
    q, k, v = (pad_sequence(pieces, batch_first=True).transpose(1, 2) for pieces in own)
    shared = [x.transpose(0, 1).expand(len(q), -1, -1, -1) for x in (prompt_key, prompt_value)]
    keys, values = torch.cat([shared[0], k], dim=2), torch.cat([shared[1], v], dim=2)
    attended = tail_attention(q, keys, values, scale).transpose(1, 2)  # (K, R, H, D)
    return [row[: len(piece)] for row, piece in zip(attended, own[0], strict=True)]


def tail_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    scale: float,
) -> Float[Tensor, "B H Q D"]:
    """Causal attention of the last Q of S tokens: softmax(scale·q·kᵀ + mask)·v.

    Query i stands at place S − Q + i and sees every key up to there.
    """
    attended: Tensor = _TailAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return attended


class _TailAttention(torch.autograd.Function):
    """Written out to mask scores in place and to multiply heads that share keys in one product."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, queries, size = query.shape
        groups, keys = key.shape[1:3]
        rows = heads // groups * queries
        folded = (query * scale).reshape(batch * groups, rows, size)
        k, v = (x.reshape(batch * groups, keys, size) for x in (key, value))
        scores = torch.bmm(folded, k.mT)
        future = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
        own = scores.view(-1, heads // groups, queries, keys)[..., keys - queries :]
        own.masked_fill_(future, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(folded, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v).view(batch, heads, queries, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
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
        return by_query, by_key.view(shape), by_value.view(shape), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, shared_prefix_attention)


def share_prompts(module: RewardModule) -> str | None:
    """Switch a module to this attention; where it would not be exact, say why and change nothing.

    The answer is tried, not looked up: a small packed row must give the rewards of padded rows.
    """
    classifier = module.classifier
    reason = _other_attention(classifier.config)
    if reason:
        return reason
    before = classifier.config._attn_implementation
    classifier.set_attn_implementation(ATTENTION)
    if classifier.config._attn_implementation != ATTENTION:
        return f"{type(classifier).__name__} has its own attention code"
    try:
        difference = _probe(module)
    except (TypeError, ValueError, RuntimeError) as error:
        classifier.set_attn_implementation(before)
        return f"{type(classifier).__name__} cannot run on packed rows ({error})"
    if difference > TOLERANCE:
        classifier.set_attn_implementation(before)
        return f"packed rows change the rewards of {type(classifier).__name__} by {difference:.2%}"
    return None


def _other_attention(config: PreTrainedConfig) -> str | None:
    """Attention that differs from causal only beyond a distance, which a short trial cannot see."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"its layers use {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return f"its attention slides over a window of {window} tokens"
    return None


def _probe(module: RewardModule) -> float:
    """Largest difference between rewards of a packed row and of padded rows, relative."""
    first = Group("", tuple(range(3, 14)), ((14, 15, 16), (17,), (18, 19)), ())
    second = Group("", (5, 9, 7), ((11, 3), (4, 8, 6, 10)), ())
    packed = pack([first, second], 0)
    sequences = [group.prompt + one for group in (first, second) for one in group.responses]
    padded = pad_right(sequences, 0)
    reads = last_tokens(padded.mask.sum(dim=1), padded.ids.shape[1])
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()
    with torch.no_grad():
        rewards = [module(inputs.to(device)) for inputs in (packed, Inputs(padded.ids, reads))]
    module.train(was_training)
    return float((rewards[0] - rewards[1]).abs().max() / rewards[1].abs().max())
