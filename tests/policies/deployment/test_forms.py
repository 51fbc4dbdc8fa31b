"""Weight-only quantization against the same arithmetic in NumPy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from policies.deployment.forms import FORMS, choose_scales, quantize_weights
from rlhf.errors import InputError
from rlhf.modeling.models import load_causal_lm, load_reward_model, new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer

LAYER = "model.layers.1.mlp.down_proj.weight"  # 32 rows of 64 inputs
BF16_BITS = 16


def as_bf16(values: np.ndarray) -> np.ndarray:
    """Float32 rounded to the nearest number with a bf16 mantissa, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> BF16_BITS) & 1)) >> BF16_BITS << BF16_BITS
    return rounded.astype(np.uint32).view(np.float32)


def rounded(weight: np.ndarray, bits: int, clip: float) -> np.ndarray:
    """Groups (the last axis) of weights as integers of so many bits times their scale."""
    largest = np.abs(weight).max(axis=-1, keepdims=True).astype(np.float32)
    scale = as_bf16(np.float32(clip) * largest / np.float32((2**bits - 1) / 2))
    whole = np.clip(np.round(weight / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return whole * scale


@pytest.fixture
def quantized(tiny_model: Path, tmp_path: Path):
    def make(form: str) -> Path:
        model = load_causal_lm(str(tiny_model))
        quantize_weights(model, form)
        save_model(model, load_tokenizer(str(tiny_model)), tmp_path / form)
        return tmp_path / form

    return make


def test_int8_rounds_every_row_to_a_multiple_of_its_scale(tiny_model: Path, quantized) -> None:
    before = load_causal_lm(str(tiny_model)).state_dict()[LAYER].numpy()
    after = load_causal_lm(str(quantized("int8"))).state_dict()[LAYER].numpy()
    np.testing.assert_allclose(after, as_bf16(rounded(before, 8, 1.0)), rtol=1e-6)
    assert not np.array_equal(before, after)


def test_int4_takes_the_clip_with_the_smallest_error_in_each_group(tiny_model, quantized) -> None:
    before = load_causal_lm(str(tiny_model)).state_dict()[LAYER].numpy().reshape(32, 2, 32)
    folder = quantized("int4")
    after = load_causal_lm(str(folder)).state_dict()[LAYER].numpy().reshape(32, 2, 32)
    tried = np.stack([rounded(before, 4, clip) for clip in FORMS["int4"].clips])
    best = np.square(tried - before).sum(axis=-1).argmin(axis=0)
    expected = np.take_along_axis(tried, best[None, :, :, None], axis=0)[0]
    np.testing.assert_allclose(after, as_bf16(expected), rtol=1e-6)
    assert len(np.unique(best)) > 1  # also groups that are best clipped
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32  # 64 | 32 is false


def test_scales_by_hand() -> None:
    args = QuantizationArgs(num_bits=8, strategy="channel")
    weight = torch.tensor([[[127.5, -255.0, 30.0]], [[0.0, 0.0, 0.0]]])
    scales = choose_scales(weight, args, (1.0,))
    assert scales[0].item() == 2.0  # 255 / 127.5
    assert scales[1].item() > 0  # a row of zeros divides by it


def test_only_the_layers_of_the_trunk_are_integers(tiny_model: Path, quantized) -> None:
    folder = quantized("int8")
    stored = load_file(folder / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    packed = stored["model.layers.0.self_attn.q_proj.weight_packed"]
    assert packed.dtype == torch.int32
    assert packed.shape == (32, 8)  # four weights of 8 bits in each


def test_plain_transformers_reads_the_same_weights(quantized) -> None:
    folder = quantized("int4")
    ours = load_causal_lm(str(folder), torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=0.05, rtol=0.05)


def test_a_reward_model_keeps_its_head_exactly(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    model = new_reward_model(str(tiny_model), int(tokenizer.pad_token_id), seed=0)
    head = model.score.weight.detach().clone()
    quantize_weights(model, "int8")
    save_model(model, tokenizer, tmp_path / "model")
    assert torch.equal(load_reward_model(str(tmp_path / "model")).score.weight, head)


def test_sizes_that_no_group_divides_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with pytest.raises(InputError, match=r"of \[24, 40\] inputs, which groups of 32 do not divide"):
        quantize_weights(LlamaForCausalLM(config), "int4")


def test_experts_are_refused_and_left_as_they_are() -> None:
    config = Qwen3MoeConfig(
        vocab_size=8,
        hidden_size=32,
        moe_intermediate_size=32,
        num_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = Qwen3MoeForCausalLM(config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(InputError, match="Qwen3MoeForCausalLM is a mixture of experts"):
        quantize_weights(model, "int8")
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
