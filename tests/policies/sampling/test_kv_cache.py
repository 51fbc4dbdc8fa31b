"""The cache of sampling holds what transformers' own does, and copies it less often."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

from policies.sampling.kv_cache import RoomyLayer, new_cache
from rlhf.modeling.attention.matmul import MANY_KEYS
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import pad_left

PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 11, 12]]
NEW = 12
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    return load_causal_lm(str(tiny_model)).eval()


def tokens(rows: int, count: int, first: int) -> Tensor:
    """Keys of 2 heads and size 3 that count up from `first`."""
    size = rows * 2 * count * 3
    return torch.arange(first, first + size, dtype=torch.float32).view(rows, 2, count, 3)


def most_likely(model: PreTrainedModel, cache: DynamicCache | None) -> tuple[Tensor, Tensor]:
    """NEW tokens for each prompt, and the logits that they came from."""
    batch = pad_left(PROMPTS, 0)
    how = GenerationConfig(
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    found = model.generate(
        input_ids=batch.ids,
        attention_mask=batch.mask.long(),
        past_key_values=cache,
        generation_config=how,
    )
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_gives_the_same_logits_as_with_the_cache_of_transformers(
    model: PreTrainedModel, precision: str
) -> None:
    cache = new_cache(model, NEW)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        found, expected = most_likely(model, cache), most_likely(model, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    held = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {layer.keys.dtype for layer in cache.layers} == {held}
    assert {layer.values.dtype for layer in cache.layers} == {held}
    assert cache.get_seq_length() == max(map(len, PROMPTS)) + NEW - 1  # the last one is not read


def test_tokens_are_added_in_place_until_there_is_no_more_room() -> None:
    layer = RoomyLayer(room=2)
    parts = [tokens(2, 4, 0), tokens(2, 1, 100), tokens(2, 1, 200), tokens(2, 1, 300)]
    places = []
    for seen, part in enumerate(parts, start=1):
        keys, values = layer.update(part, -part)
        assert torch.equal(keys, torch.cat(parts[:seen], dim=2))
        assert torch.equal(values, -keys)
        assert layer.get_seq_length() == keys.shape[2]
        places.append(keys.data_ptr())
    assert places[0] == places[1] == places[2] != places[3]


def test_rows_that_are_chosen_or_repeated_share_nothing() -> None:
    layer = RoomyLayer(room=8)
    first = tokens(2, 3, 0)
    layer.update(first, first)
    layer.batch_select_indices(torch.tensor([1, 1, 0]))
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes  # no room is kept
    new = tokens(3, 1, 100)
    keys, _ = layer.update(new, new)
    assert torch.equal(keys, torch.cat([first[[1, 1, 0]], new], dim=2))
    layer.batch_repeat_interleave(2)
    more = tokens(6, 1, 200)
    keys, values = layer.update(more, more)
    assert torch.equal(
        keys, torch.cat([torch.cat([first[[1, 1, 0]], new], 2)[[0, 0, 1, 1, 2, 2]], more], 2)
    )
    assert torch.equal(values, keys)
    layer.crop(-4)
    keys, _ = layer.update(more, more)
    assert torch.equal(keys, torch.cat([first[[1, 1, 1, 1, 0, 0]][:, :, :1], more], dim=2))


def test_many_rows_in_bf16_are_as_near_to_float32_as_with_the_cache_of_transformers(
    model: PreTrainedModel,
) -> None:
    """On CPUs attention multiplies matrices where all rows together have many keys."""
    for layer in model.model.layers:  # random weights would give the mean of all values
        layer.self_attn.q_proj.weight.data *= 10
    ids = torch.randint(1, model.config.vocab_size, (40, 20), generator=torch.manual_seed(0))
    assert ids.numel() > MANY_KEYS
    expected = model(ids).logits[:, -1]
    errors = {}
    for cache in (new_cache(model, 2), DynamicCache(config=model.config)):
        with torch.autocast("cpu", torch.bfloat16):
            model(ids[:, :-1], past_key_values=cache)
            found = model(ids[:, -1:], past_key_values=cache).logits[:, -1].float()
        errors[type(cache.layers[0])] = (found - expected).abs().max() / expected.abs().max()
    assert errors[RoomyLayer] < 1.5 * errors[DynamicLayer] + 0.005
    assert errors[DynamicLayer] < 0.05


def test_a_window_slides_over_rounded_keys_and_values() -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(**SIZES, **heads, sliding_window=4)
    model = MistralForCausalLM(config).eval()
    cache = new_cache(model, NEW)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = most_likely(model, cache), most_likely(model, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {layer.values.dtype for layer in cache.layers} == {torch.bfloat16}
    assert {layer.keys.shape[2] for layer in cache.layers} == {3}


def test_layers_that_keep_a_state_have_the_cache_of_transformers() -> None:
    assert new_cache(MambaForCausalLM(MambaConfig(**SIZES)), NEW) is None
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))
    assert new_cache(llama, NEW) is not None
