"""Which models each process may read its part of: buffers, layers and files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.errors import InputError
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.weights.stored import compute_buffers, obstacles_in_layers
from rlhf.modeling.weights.whole import tensor_files

SIZES: dict[str, Any] = {
    **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None},
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 48, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "phi3", "cohere", "olmo2"), SIZES),
    **{
        "mistral": SIZES | {"sliding_window": 8},
        "gpt2": GPT2,
        "gemma2": SIZES,
        "gemma3_text": SIZES,
    },
    "llama with yarn": SIZES | {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "llama with llama3 rope": SIZES
    | {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 16,
        }
    },
}


def outline_and_model(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model on `meta`, and one with weights."""
    config = AutoConfig.for_model(name.partition(" ")[0], **MODELS[name])
    with torch.device("meta"):
        outline: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return outline, AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_a_model_that_is_loaded_whole(name: str) -> None:
    outline, model = outline_and_model(name)
    assert compute_buffers(outline) == []
    found = dict(outline.named_buffers())
    for buffer, wanted in model.named_buffers():
        assert found[buffer].dtype == wanted.dtype
        assert torch.equal(found[buffer], wanted), buffer
    assert list(obstacles_in_layers(outline)) == []


def test_a_buffer_that_transformers_does_not_compute_is_named() -> None:
    outline, _ = outline_and_model("llama")
    outline.model.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    assert compute_buffers(outline) == ["model.scale"]


def test_layers_must_be_like_the_first_two_with_which_packed_rows_are_tried() -> None:
    outline, _ = outline_and_model("llama")
    outline.model.layers[2].mlp = nn.Sequential(outline.model.layers[2].mlp)
    said = "packed rows are tried with 2 layers, and others differ from these"
    assert list(obstacles_in_layers(outline)) == [said]


def test_files_that_the_model_does_not_need_may_be_broken(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plain = load_causal_lm(str(tiny_model)).state_dict()
    (tmp_path / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    found = load_causal_lm(str(tmp_path)).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in plain.items())
    files, unreadable = tensor_files(tmp_path)
    assert unreadable == ["consolidated.safetensors"]
    assert set(files["model.norm.weight"]) == {"model.safetensors"}
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match=r"Cannot load the weights of .*/model\.safetensors "):
        load_causal_lm(str(tmp_path))
