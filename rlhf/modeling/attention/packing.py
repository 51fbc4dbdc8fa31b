"""Packs sequences into one row without padding, in which a common prefix is encoded once.

Prompts with one system turn, or several responses to one prompt, share their first tokens. Logits,
values and gradients are those of padded rows, except for rounding. Only attention differs: it is
that of `shared_prefix`, registered under another name, because sampling from the same model needs
the mask of padded batches.

Letters: B sequences, R response tokens, T tokens of the row, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf.modeling.attention.layout import Segment, TrunkInputs, common_prefix_length, states
from rlhf.modeling.attention.shared_prefix import (
    LEAST_SAVING,
    shared_prefix_attention,
    try_attention,
)
from rlhf.modeling.tokens import TokenBatch, join, pad_left, pad_right

ATTENTION = "packed_sequences"

Group = tuple[int, list[int]]  # how many first tokens are shared, and by which sequences


def pack_sequences(joined: TokenBatch, response_mask: Bool[Tensor, "B R"]) -> TrunkInputs:
    """Pack sequences, sharing whatever saves more: one prefix of all, or equal prompts.

    Args:
        joined: prompts and responses, padded anywhere.
        response_mask: which of the last R columns are response tokens; each has a token before it.

    Returns:
        One row in main memory, which is read before every response token (B, R); 0 at padding.
    """
    response_mask = response_mask.cpu()
    lengths = response_mask.sum(dim=1).tolist()
    masks = joined.mask.cpu()
    rows = [ids[mask].tolist() for ids, mask in zip(joined.ids.cpu(), masks, strict=True)]
    prompts = [row[: len(row) - length] for row, length in zip(rows, lengths, strict=True)]
    ids: list[int] = []
    positions: list[int] = []
    before: list[list[int]] = [[] for _ in rows]
    layout = []
    for shared, members in min(_one_group(rows), _by_prompt(prompts), key=lambda g: _size(g, rows)):
        start = len(ids)
        ids += rows[members[0]][:shared]
        positions += range(shared)
        for member in members:
            own = range(len(ids), len(ids) + len(rows[member]) - shared)
            indices = [*range(start, start + shared), *own]
            before[member] = indices[-lengths[member] - 1 : -1]
            ids += rows[member][shared:]
            positions += range(shared, len(rows[member]))
        layout.append(Segment(shared, tuple(len(rows[member]) - shared for member in members)))
    reads = torch.zeros(response_mask.shape, dtype=torch.long)
    reads[response_mask] = torch.tensor([index for part in before for index in part])
    return TrunkInputs(torch.tensor([ids]), reads, torch.tensor([positions]), tuple(layout))


def _one_group(rows: Sequence[list[int]]) -> list[Group]:
    """One group of all."""
    return [(common_prefix_length(rows), list(range(len(rows))))]


def _by_prompt(prompts: Sequence[list[int]]) -> list[Group]:
    """A group for every distinct prompt."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(number)
    return [(len(prompt), members) for prompt, members in groups.items()]


def _size(groups: Sequence[Group], rows: Sequence[list[int]]) -> int:
    """Tokens of the packed row."""
    return sum(map(len, rows)) - sum(shared * (len(members) - 1) for shared, members in groups)


def pack_if_shorter(
    model: Any, joined: TokenBatch, response_mask: Bool[Tensor, "B R"]
) -> TrunkInputs | None:
    """The sequences as one row in main memory, if the model can read it and it is shorter."""
    if model.config._attn_implementation != ATTENTION:
        return None
    row = pack_sequences(joined, response_mask)
    return row if row.ids.numel() <= (1 - LEAST_SAVING) * joined.ids.numel() else None


def pack_prefixes(model: PreTrainedModel) -> str | None:
    """Let a model read packed rows; if it would not be exact, return why and change nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, shared_prefix_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)
    return try_attention(model, ATTENTION, _probe)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> float:
    """Largest difference between the trunk's outputs for a packed row and for padded rows."""
    prompts = pad_left([[3, 4, 5, 6, 7], [3, 4, 8], [3, 4, 9, 10]], 0)
    responses = pad_right([[11, 12, 13], [14, 15], [16]], 0)
    device, mask = next(model.parameters()).device, responses.mask
    joined = join(prompts, responses)
    row = pack_sequences(joined, mask).to(device)
    was_training = model.training
    model.eval()
    packed = states(model, row)[row.reads]
    padded = features_of_padded(model, joined.to(device), mask.shape[1])
    model.train(was_training)
    return float((packed - padded)[mask].abs().max() / padded[mask].abs().max())


def features_of_padded(
    model: PreTrainedModel, joined: TokenBatch, length: int
) -> Float[Tensor, "B R d"]:
    """The trunk's output before each response token; responses are the last `length` columns."""
    trunk: nn.Module = model.base_model
    hidden: Tensor = trunk(**joined.model_inputs).last_hidden_state
    return hidden[:, -length - 1 : -1]


def _mask(*, attention_mask: Tensor | None = None, **rest: Any) -> Tensor | None:
    """The mask of a padded batch, or behind a cache.

    Rows without padding need none, but a GPU is not waited for to say that.
    """
    if attention_mask is not None and attention_mask.device.type != "cpu":
        rest["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **rest)
    return mask
