"""Attention over packed rows on a GPU: FlexAttention under a mask made from the row's layout.

One kernel computes what `shared_prefix` multiplies piece by piece. It skips every 128 × 128 block
of scores that is masked entirely, and keeps no scores for the backward pass. It is compiled once
for all lengths, on first use. A small trial on the GPU decides whether its results are right; if
not, plain matrix products are used. Letters: T tokens, H heads, G key-value heads (G ≤ H), D head
size.
"""

import sys
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from rlhf.modeling.attention.layout import Segment, Segments
from rlhf.modeling.tokens import send
from rlhf.ranks import is_main_process

BLOCK = 128  # shorter rows use another kernel, without blocks to skip
TRIAL = (Segment(150, (40, 30)), Segment(5, (7, 1)))
TOLERANCE = 0.02  # relative; bf16 rounds to 0.4 %
GRAPHS = 64  # kept at most; torch's 8 are soon used up by head shapes, precisions and gradients

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_prefix_attention(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 G T D"],
    value: Float[Tensor, "1 G T D"],
    layout: Segments,
    scale: float,
) -> Float[Tensor, "1 T H D"]:
    """Causal attention in which each response sees its own prompt and itself."""
    tokens = query.shape[2]
    layout = fill_block(layout)
    filler = (0, 0, 0, count_tokens(layout) - tokens)
    # Under autocast only projections give the lower precision; rotation brings back float32.
    query, key, value = (pad(x.to(value.dtype), filler) for x in (query, key, value))
    attended = _compiled_attention()(
        query,
        key,
        value,
        block_mask=block_mask(layout, query.device),
        scale=scale,
        enable_gqa=True,
    )
    return attended[:, :, :tokens].transpose(1, 2).contiguous()


@cache
def _compiled_attention() -> Callable[..., Tensor]:
    """FlexAttention compiled for any length: one graph per head shape, precision and gradient mode.

    Past the limit of graphs PyTorch would compute all T × T scores after a single warning;
    `fullgraph` makes that an error.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


def fill_block(layout: Segments) -> Segments:
    """The layout with a segment that fills the last block of the row, which nothing else sees."""
    missing = -count_tokens(layout) % BLOCK
    return (*layout, Segment(missing, ())) if missing else layout


def count_tokens(layout: Segments) -> int:
    """The number of tokens of a row."""
    return sum(segment.prompt + sum(segment.responses) for segment in layout)


@lru_cache(maxsize=2)
def block_mask(layout: Segments, device: torch.device) -> BlockMask:
    """The mask of a row of whole blocks: made once, used by every layer, forward and backward.

    `create_block_mask` would compute all T × T places on the device to find the blocks.
    """
    tokens, seen = count_tokens(layout), torch.from_numpy(count_visible(layout))
    is_full = seen == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *_list_blocks((seen > 0) & ~is_full, device),
        *_list_blocks(is_full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible(layout, device),
        seq_lengths=(tokens, tokens),
    )


def _list_blocks(
    chosen: Bool[Tensor, "Q K"], device: torch.device
) -> tuple[Int[Tensor, "1 1 Q"], Int[Tensor, "1 1 Q K"]]:
    """How many blocks of keys are chosen for each block of queries, and which; these come first."""
    order = chosen.byte().argsort(dim=1, descending=True, stable=True)
    return (
        send(chosen.sum(dim=1).int()[None, None], device),
        send(order.int()[None, None], device),
    )


def count_visible(layout: Segments) -> Int[np.ndarray, "Q K"]:
    """How many of their keys the queries see, for every block of queries and block of keys."""
    edges = np.arange(0, count_tokens(layout) + BLOCK, BLOCK)
    seen = np.zeros((len(edges) - 1, len(edges) - 1), dtype=np.int64)
    start = 0
    for segment in layout:
        prompt = np.diff(edges.clip(start, start + segment.prompt))  # tokens of it in each block
        for part, length in enumerate((segment.prompt, *segment.responses)):
            own = np.diff(edges.clip(start, start + length))
            there = own > 0
            mine = own[there]
            causal = np.tril(np.outer(mine, mine), -1) + np.diag(mine * (mine + 1) // 2)
            seen[np.ix_(there, there)] += causal
            if part:
                seen[np.ix_(there, prompt > 0)] += np.outer(mine, prompt[prompt > 0])
            start += length
    return seen


def visible(layout: Segments, device: torch.device) -> Mask:
    """A function of batch, head, query and key: whether the query's position sees the key's."""
    segment, part = (send(numbers, device) for numbers in number_tokens(layout))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shared = (part[key] == 0) | (part[key] == part[query])
        return (key <= query) & (segment[key] == segment[query]) & shared

    return sees


def number_tokens(layout: Segments) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """For every token the number of its segment, and of its response in it (0: the prompt)."""
    pieces = [
        (number, part, length)
        for number, segment in enumerate(layout)
        for part, length in enumerate((segment.prompt, *segment.responses))
    ]
    numbers, parts, lengths = torch.tensor(pieces).unbind(dim=1)
    return numbers.repeat_interleave(lengths), parts.repeat_interleave(lengths)


def is_usable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether FlexAttention is used for these heads: on a GPU, for long rows, if it is correct."""
    if query.device.type != "cuda" or query.shape[2] <= BLOCK:
        return False
    return _find_obstacle(query.shape[1], *key.shape[1::2], value.dtype, query.device) is None


@lru_cache
def _find_obstacle(
    heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Try it once; returns what is wrong, if anything."""
    try:
        difference = try_flex(heads, groups, size, dtype, device)
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]  # the compiler wraps errors
        obstacle = f"does not run here ({cause})"
    else:
        if difference <= TOLERANCE:
            return None
        obstacle = f"is off by {difference:.2%}"
    if is_main_process():
        message = f"FlexAttention {obstacle}: using plain matrix products, which are slower.\n"
        sys.stderr.write(message)
    return obstacle


def try_flex(heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of a small random row and its gradients against plain attention."""
    generator = torch.Generator().manual_seed(0)
    tokens = count_tokens(TRIAL)
    query, key, value, weight = (
        torch.randn(1, number, tokens, size, generator=generator).to(device, dtype)
        for number in (heads, groups, groups, heads)
    )
    for x in (query, key, value):
        x.requires_grad_()
    positions = torch.arange(tokens, device=device)
    mask = visible(TRIAL, device)(positions, positions, positions[:, None], positions)

    def attend(*, flex: bool) -> list[Tensor]:
        if flex:
            scale = size**-0.5
            attended = flex_prefix_attention(query, key, value, TRIAL, scale)
            attended = attended.transpose(1, 2)
        else:
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
        return [attended.detach(), *torch.autograd.grad(attended, (query, key, value), weight)]

    def keep(tensor: Tensor) -> Tensor:
        return tensor

    # keep these tensors out of a surrounding gradient checkpoint
    with (
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        saved_tensors_hooks(keep, keep),
    ):
        pairs = zip(attend(flex=True), attend(flex=False), strict=True)
        return max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
