"""The files of sharded models are those that `save_pretrained` writes."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf.modeling.adapters import add_adapters, save_merged, save_sharded
from rlhf.modeling.heads import empty_causal_lm
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.weight_files import WeightFiles

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 101}
LLAMA = LlamaConfig(**SMALL, intermediate_size=24)
TIED = LlamaConfig(**SMALL, intermediate_size=24, tie_word_embeddings=True)
GPT2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=101, n_positions=10)
EXPERTS = MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def files_of(model: PreTrainedModel, size: int | str) -> WeightFiles:
    kept = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name not in model.all_tied_weights_keys
    }
    return WeightFiles(
        Accelerator(cpu=True),
        empty_causal_lm(model.config),
        lambda gather: ((name, gather(value)) for name, value in kept.items()),
        size,
    )


@pytest.mark.parametrize("size", ["50GB", "20KB", 100])
@pytest.mark.parametrize(
    "config", [LLAMA, TIED, GPT2, EXPERTS], ids=["llama", "tied", "gpt2", "experts"]
)
def test_they_are_the_same_byte_for_byte(
    tmp_path: Path, config: PreTrainedConfig, size: int | str
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    files = files_of(model, size)
    files.model.save_pretrained(tmp_path / "ours", state_dict={})
    files.write(tmp_path / "ours")
    state = dict(files.weights(lambda value: value.detach()))
    files.model.save_pretrained(tmp_path / "theirs", state_dict=state, max_shard_size=size)
    theirs, ours = contents(tmp_path / "theirs"), contents(tmp_path / "ours")
    assert len([name for name in ours if name.endswith(".safetensors")]) > (size != "50GB")
    if config is not EXPERTS or size == "50GB":  # parts of one tensor go into one file there
        assert ours == theirs
    assert files.find_differences(tmp_path / "ours") == []
    loaded = load_causal_lm(str(tmp_path / "ours")).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_a_weight_that_was_lost_is_found(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    files = files_of(model, "20KB")
    files.write(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert files.find_differences(tmp_path) == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["llama", "tied"])
def test_adapters_are_merged_as_in_a_model_that_is_not_sharded(
    tmp_path: Path, tiny_model: Path, config: PreTrainedConfig
) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    add_adapters(model, 2, 4, seed=0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".lora_B" in name:
                value.normal_()
    tokenizer = load_tokenizer(str(tiny_model))
    save_merged(model, tokenizer, tmp_path / "theirs")
    state = model.state_dict(keep_vars=True)
    save_sharded(Accelerator(cpu=True), model, state, tokenizer, tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
