"""Inputs of a model's trunk: padded rows, or prompts with their responses in one packed row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.modeling.tokens import send

TokenIds = Sequence[int]


@dataclass(frozen=True)
class Segment:
    """One prompt in a packed row: `prompt` tokens, then its responses of these lengths."""

    prompt: int
    responses: tuple[int, ...]


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class TrunkInputs:
    """Token ids, and the places whose outputs are read, counted over the rows laid end to end.

    Either right-padded rows, one per response, or one packed row with its positions and layout.
    `parts`, of padded rows, is 1 at a prompt's tokens, 2 at a response's and 0 at padding; a causal
    model needs none.
    """

    ids: Int[Tensor, "B T"]
    reads: Int[Tensor, "..."]
    positions: Int[Tensor, "B T"] | None = None
    layout: Segments | None = None
    parts: Int[Tensor, "B T"] | None = None

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments of the model.

        A packed row has its layout in place of a mask. It gets one nevertheless: without any,
        transformers would look for packed sequences in its positions, and wait for a GPU to tell.
        """
        given = {"input_ids": self.ids, "use_cache": False}
        if self.layout is None:
            return given
        unread = self.ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
        return given | {
            "attention_mask": unread,
            "position_ids": self.positions,
            "layout": self.layout,
        }

    def to(self, device: torch.device) -> "TrunkInputs":
        """The same inputs on another device."""
        tensors: dict[str, Any] = {
            name: send(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def pack_prompts(groups: Sequence[tuple[TokenIds, Sequence[TokenIds]]], pad_id: int) -> TrunkInputs:
    """Lay prompts with their responses end to end in one row; without any, a padding token."""
    ids: list[int] = []
    positions: list[int] = []
    reads: list[int] = []
    for prompt, responses in groups:
        length = len(prompt)
        ids += prompt
        positions += range(length)
        end_of_prompt = len(ids) - 1
        for response in responses:
            ids += response
            positions += range(length, length + len(response))
            reads.append(len(ids) - 1 if response else end_of_prompt)
    layout = tuple(Segment(len(prompt), tuple(map(len, own))) for prompt, own in groups)
    return TrunkInputs(
        torch.tensor([ids or [pad_id]]),
        torch.tensor(reads, dtype=torch.long),
        torch.tensor([positions or [0]]),
        layout or (Segment(1, ()),),
    )


def response_positions(layout: Segments) -> Iterator[list[int]]:
    """For every response, the positions of its prompt's tokens and its own in the packed row."""
    start = 0
    for segment in layout:
        prompt = range(start, start + segment.prompt)
        start += segment.prompt
        for length in segment.responses:
            yield [*prompt, *range(start, start + length)]
            start += length


def common_prefix_length(rows: Sequence[Sequence[int]]) -> int:
    """The length of the common prefix of all rows; each row keeps at least one own token."""
    columns = zip(*rows, strict=False)
    common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return min(common, min(map(len, rows)) - 1)


def states(model: PreTrainedModel, inputs: TrunkInputs) -> Float[Tensor, "T d"]:
    """The trunk's output for every token, over the rows laid end to end."""
    trunk: nn.Module = model.base_model
    hidden: Tensor = trunk(**inputs.model_inputs).last_hidden_state.flatten(0, 1)
    return hidden


def last_tokens(lengths: Int[Tensor, " B"], width: int) -> Int[Tensor, " B"]:
    """The place of the last token of each right-padded row."""
    return torch.arange(len(lengths), device=lengths.device) * width + lengths - 1
