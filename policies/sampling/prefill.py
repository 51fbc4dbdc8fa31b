"""Reads once what several prompts share, before `generate` samples from all of them.

Letters: N prompts, P tokens of the longest.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from policies.sampling.kv_cache import new_cache
from rlhf.modeling.attention.layout import common_prefix_length
from rlhf.modeling.attention.shared_prefix import LEAST_SAVING, other_attention
from rlhf.modeling.tokens import TokenBatch, join, pad_left


def prefill(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    pad_id: int,
    device: torch.device,
    new_tokens: int,
) -> tuple[TokenBatch, DynamicCache | None]:
    """The padded prompts (N, P), and a cache for `generate`; None: `generate` makes its own.

    The cache holds what the prompts share, where reading that once saves enough: the prefix of all
    prompts and, of a prompt that stands several times, all tokens but the last. With a common
    prefix, padding stands after it. `new_tokens`: the most that are sampled.
    """
    cache = new_cache(model, new_tokens)
    length, each_once = shared_parts(prompts)
    if cache is None or not (length or each_once) or other_attention(model.config):
        return pad_left(prompts, pad_id).to(device), cache
    rows = _pad_after(length, prompts, pad_id).to(device)
    if length:
        prefix = TokenBatch(rows.ids[:1, :length], rows.mask[:1, :length])
        if not _read(model, prefix, cache):
            return pad_left(prompts, pad_id).to(device), None
    if not each_once:
        cache.batch_repeat_interleave(len(prompts))
        return rows, cache
    indices = {ids: index for index, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
    different = _pad_after(length, list(indices), pad_id).to(device)
    cache.batch_repeat_interleave(len(indices))  # does nothing where it is empty
    if not _read(model, TokenBatch(different.ids[:, :-1], different.mask[:, :-1]), cache):
        return pad_left(prompts, pad_id).to(device), None
    cache.batch_select_indices(
        torch.tensor([indices[tuple(prompt)] for prompt in prompts], device=device)
    )
    return rows, cache


def shared_parts(prompts: Sequence[Sequence[int]]) -> tuple[int, bool]:
    """Choose what to read once.

    Returns:
        the length of the prefix of all prompts, or 0; and whether each different prompt is read
        once, however often it is sampled.
    """
    width, common = max(map(len, prompts)), common_prefix_length(prompts)
    different = len(set(map(tuple, prompts)))
    fewest, least_saving = len(prompts) * width, LEAST_SAVING * len(prompts) * width
    best = (0, False)
    for length, each_once in ((common, False), (0, True), (common, True)):
        own = width - length
        rest = different * (own - 1) + len(prompts) if each_once else len(prompts) * own
        if length + rest <= fewest - least_saving:
            fewest, best = length + rest, (length, each_once)
    return best


def _pad_after(length: int, prompts: Sequence[Sequence[int]], pad_id: int) -> TokenBatch:
    """The prompts with padding after their first tokens, which are the same in all."""
    prefix = torch.tensor([prompts[0][:length]], dtype=torch.long).expand(len(prompts), -1)
    rests = pad_left([prompt[length:] for prompt in prompts], pad_id)
    return join(TokenBatch(prefix, torch.ones_like(prefix, dtype=torch.bool)), rests)


def _read(model: PreTrainedModel, batch: TokenBatch, cache: DynamicCache) -> bool:
    """Add a batch, whose first columns the cache holds, to it; whether the model did so."""
    done = cache.get_seq_length()
    inputs = batch.model_inputs
    for name in ("input_ids", "position_ids"):
        inputs[name] = inputs[name][:, done:]
    model(**inputs | {"use_cache": True}, past_key_values=cache, logits_to_keep=1)
    return int(cache.get_seq_length()) == batch.ids.shape[1]
