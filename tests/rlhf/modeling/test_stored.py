"""A model whose weights are still in its files is tried on its first layers."""

import copy
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.weights.first_layers import first_layers
from rlhf.modeling.weights.stored import folder_of
from rlhf.parallel.layers import STORED, Stored


@pytest.fixture
def plain(tmp_path: Path) -> PreTrainedModel:
    """A saved model of four layers that cares about positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, num_attention_heads=4, **sizes))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    model.save_pretrained(tmp_path)
    return model.eval()


@pytest.fixture
def stored(plain: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    """The same model, its weights still in the files."""
    memo = {id(one): torch.nn.Parameter(one.detach().to("meta")) for one in plain.parameters()}
    model = copy.deepcopy(plain, memo)
    for name, weight in model.named_parameters():
        setattr(weight, STORED, Stored(tmp_path, name))
    return model


def test_the_first_layers_have_their_weights_and_compute_as_in_the_model(plain, stored) -> None:
    short, tokens = first_layers(stored), torch.tensor([[3, 4, 5]])
    assert len(short.model.layers) == 2
    assert len(stored.model.layers) == 4
    assert all(one.is_meta for one in stored.parameters())
    found = short.model(tokens, output_hidden_states=True).hidden_states
    wanted = plain.model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(short.model(tokens).last_hidden_state, plain.model.norm(wanted[2]))


def test_a_model_with_weights_is_tried_itself(plain) -> None:
    assert first_layers(plain) is plain


@pytest.mark.parametrize("switch", [share_prompts, pack_prefixes])
def test_packed_rows_are_tried_without_the_rest_of_the_weights(stored, switch) -> None:
    assert switch(stored) is None
    assert stored.config._attn_implementation in ("shared_prefix", "packed_sequences")
    assert all(one.is_meta for one in stored.parameters())


@pytest.mark.parametrize("switch", [share_prompts, pack_prefixes])
def test_positions_that_are_ignored_are_detected(
    stored, switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(stored.model).forward

    def ignoring(self, **inputs):
        return original(self, **{**inputs, "position_ids": None})

    monkeypatch.setattr(type(stored.model), "forward", ignoring)
    assert "packed rows change what LlamaForCausalLM gives" in switch(stored)
    assert stored.config._attn_implementation == "sdpa"


def test_a_model_on_the_hub_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--somebody--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    assert folder_of("somebody/model") == kept / "snapshots" / "abc"
    assert folder_of(str(tmp_path)) == tmp_path
    assert list(folder_of("somebody/other").glob("*.safetensors")) == []


def test_adapters_start_as_beside_weights_and_freeze_them(plain, stored) -> None:
    for model in (plain, stored):
        add_adapters(model, rank=2, alpha=4, seed=3)
    for (name, here), (other, there) in zip(
        plain.named_parameters(), stored.named_parameters(), strict=True
    ):
        assert name == other
        assert here.requires_grad == there.requires_grad == ("lora" in name)
        if "lora" in name:
            assert torch.equal(here, there)
        else:
            assert there.is_meta
            assert getattr(there, STORED)
