"""Attention over packed rows in plain matrix products, on CPUs faster than the fused kernel.

Segments of similar length are attended in one block, padded to the longest, as long as their scores
fit a cache: alone, short ones take more time for calls than for products. Letters: T tokens, H
heads, G key-value heads (G ≤ H), D head size, B rows, P prompt tokens, Q queries, S keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding
from torch.nn.utils.rnn import pad_sequence

from rlhf.modeling.attention.layout import Segment, Segments
from rlhf.modeling.attention.matmul import future, tail_attention
from rlhf.modeling.tokens import send

QUERIES_AT_ONCE = 128  # a long prompt goes in blocks: half its square is never computed
SCORES_AT_ONCE = 2**17  # of one head, in one block
PADDING_AT_MOST = 1.2  # scores with padding, relative to those without


@dataclass(frozen=True)
class Block:
    """Segments that are attended together, as positions in the row; -1 is padding.

    Padding reads the row's first token: no token attends to it, and its output is not used.
    """

    prompts: Int[Tensor, "B P"]
    """Padded on the right."""
    shared: Int[Tensor, "N P"]
    """The prompt of every response, padded on the left, so that the response follows directly."""
    own: Int[Tensor, "N Q"]
    """The responses, padded on the right."""
    is_padded: bool
    """Whether `shared` has padding: on a GPU nobody looks."""

    @classmethod
    def of(cls, pieces: Sequence[Sequence[Tensor]]) -> "Block":
        """A block of segments, given as the positions of each one's prompt and responses."""
        prompts = [prompt for prompt, *_ in pieces]
        shared = [prompt for prompt, *responses in pieces for _ in responses]
        own = [response for _, *responses in pieces for response in responses]
        before = _pad(shared, "left")
        return cls(_pad(prompts, "right"), before, _pad(own, "right"), bool((before < 0).any()))

    def to(self, device: torch.device) -> "Block":
        """The same block on another device."""
        prompts, shared, own = (send(x, device) for x in (self.prompts, self.shared, self.own))
        return Block(prompts, shared, own, self.is_padded)

    @cached_property
    def hidden(self) -> Bool[Tensor, "N Q M"]:
        """What responses may not see: their own future, and padding before their prompt."""
        own = future(self.own.shape[1], self.own.device)
        padding = self.shared < 0
        if not self.is_padded:
            return own
        before = padding[:, None].expand(-1, own.shape[1], -1)
        return torch.cat([before, own.expand(len(before), -1, -1)], dim=2)


@dataclass(frozen=True)
class AttentionPlan:
    """The blocks of a row, and the place of each of its tokens in their joined outputs."""

    blocks: tuple[Block, ...]
    order: Int[Tensor, " T"]


def prefix_attention(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "T G D"],
    value: Float[Tensor, "T G D"],
    layout: Segments,
    scale: float,
) -> Float[Tensor, "T H D"]:
    """Causal attention in which each response sees its own prompt and itself."""
    plan = make_plan(layout, query.device)
    outputs: list[Tensor] = []
    for block in plan.blocks:
        q, k, v = (_take(x, block.prompts) for x in (query, key, value))
        outputs += [part.transpose(1, 2).flatten(0, 1) for part in _attend_prompts(q, k, v, scale)]
        if block.own.numel():
            q, k, v = (_take(x, block.own) for x in (query, key, value))
            keys, values = (
                torch.cat([_take(x, block.shared), own], dim=2) for x, own in ((key, k), (value, v))
            )
            attended = tail_attention(q, keys, values, scale, block.hidden)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return _rows(torch.cat(outputs), plan.order)


def _attend_prompts(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Iterator[Tensor]:
    """Causal attention of prompts to themselves, by blocks of queries."""
    for start in range(0, query.shape[2], QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, query.shape[2])
        hidden = future(end - start, query.device)
        yield tail_attention(
            query[:, :, start:end], key[:, :, :end], value[:, :, :end], scale, hidden
        )


def _take(x: Float[Tensor, "T H D"], positions: Int[Tensor, "B P"]) -> Float[Tensor, "B H P D"]:
    return _rows(x, positions.clamp(min=0)).transpose(1, 2)


def _rows(x: Float[Tensor, "T H D"], positions: Int[Tensor, "..."]) -> Float[Tensor, "... H D"]:
    """x[positions], with the gradient of an embedding, which is faster than that of an index."""
    return embedding(positions, x.flatten(1)).view(*positions.shape, *x.shape[1:])


@lru_cache(maxsize=2)
def make_plan(layout: Segments, device: torch.device) -> AttentionPlan:
    """The blocks of a row, which are the same for every layer, forward and backward."""
    starts = [0, *accumulate(segment.prompt + sum(segment.responses) for segment in layout)]
    blocks, order, done = [], torch.empty(starts[-1], dtype=torch.long), 0
    for numbers in group_by_length(layout):
        block = Block.of([_pieces(starts[number], layout[number]) for number in numbers])
        for positions in (*block.prompts.split(QUERIES_AT_ONCE, dim=1), block.own):
            real = positions >= 0
            order[positions[real]] = done + torch.arange(positions.numel()).view_as(positions)[real]
            done += positions.numel()
        blocks.append(block.to(device))
    return AttentionPlan(tuple(blocks), send(order, device))


def group_by_length(layout: Segments) -> list[list[int]]:
    """Groups of segments that are attended together, by number."""
    groups: list[list[int]] = []
    for number in sorted(range(len(layout)), key=lambda n: (layout[n].prompt, _longest(layout[n]))):
        if groups and _is_cheap([layout[n] for n in (*groups[-1], number)]):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _is_cheap(block: Sequence[Segment]) -> bool:
    """Whether padding adds little, and the scores of a head fit the cache."""
    prompt = max(segment.prompt for segment in block)
    longest = max(_longest(segment) for segment in block)
    padded = sum(_scores(prompt, [longest] * len(segment.responses)) for segment in block)
    real = sum(_scores(segment.prompt, segment.responses) for segment in block)
    return padded <= min(PADDING_AT_MOST * real, SCORES_AT_ONCE)


def _scores(prompt: int, responses: Sequence[int]) -> int:
    return prompt * prompt + sum(length * (prompt + length) for length in responses)


def _longest(segment: Segment) -> int:
    return max(segment.responses, default=0)


def _pieces(start: int, segment: Segment) -> tuple[Tensor, ...]:
    """Positions of a prompt and of each of its responses."""
    lengths = (segment.prompt, *segment.responses)
    positions: tuple[Tensor, ...] = torch.arange(start, start + sum(lengths)).split(lengths)
    return positions


def _pad(pieces: list[Tensor], side: str) -> Int[Tensor, "N L"]:
    if not pieces:
        return torch.empty(0, 0, dtype=torch.long)
    return pad_sequence(pieces, batch_first=True, padding_value=-1, padding_side=side)
