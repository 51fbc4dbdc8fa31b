"""Adapters: what is trained, what is saved, and one set of frozen weights under several models."""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from rlhf.errors import ConfigError, InputError
from rlhf.modeling.adapters import (
    add_adapters,
    four_bits,
    load_reward_model_on,
    merged_weights,
    require_adapters,
    save_adapters,
    save_merged,
    share_weights,
    without_adapters,
)
from rlhf.modeling.heads import empty_reward_model
from rlhf.modeling.models import (
    describe_model,
    load_causal_lm,
    load_reward_model,
    new_reward_model,
    save_model,
)
from rlhf.modeling.tokens import load_tokenizer


def add_random_adapters(model, seed=1):
    """Adapters that change the output: B matrices of fresh ones are 0."""
    add_adapters(model, rank=4, alpha=8, seed=seed)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.fixture
def adapted(tiny_model):
    return add_random_adapters(new_reward_model(str(tiny_model), 0, seed=0))


def test_only_adapters_and_the_head_are_trained(adapted):
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert "score.weight" in trained
    assert all(".lora_" in name for name in trained - {"score.weight"})
    assert len(trained) == 1 + 2 * 2 * 7  # two layers of seven matrices, two halves each


def test_processes_with_other_seeds_start_with_the_same_adapters(tiny_model):
    halves = []
    for seed in (1, 2):
        classifier = new_reward_model(str(tiny_model), 0, seed=0)
        torch.manual_seed(seed)
        add_adapters(classifier, rank=4, alpha=8, seed=7)
        halves.append(classifier.model.layers[0].mlp.up_proj.lora_A.default.weight)
    torch.testing.assert_close(*halves, atol=0, rtol=0)


def test_merged_weights_are_those_of_the_library(adapted):
    merged = merged_weights(adapted, adapted.state_dict())
    layer = adapted.model.layers[1].self_attn.q_proj
    by_hand = layer.base_layer.weight + 8 / 4 * (
        layer.lora_B.default.weight @ layer.lora_A.default.weight
    )
    torch.testing.assert_close(merged["model.layers.1.self_attn.q_proj.weight"], by_hand)
    for name, part in adapted.named_modules():
        if isinstance(part, LoraLayer):
            part.merge()
            torch.testing.assert_close(merged.pop(f"{name}.weight"), part.base_layer.weight)
    untouched = adapted.state_dict()
    assert merged.keys() == {name for name in untouched if "_proj" not in name}
    for name, value in merged.items():
        torch.testing.assert_close(value, untouched[name])


def test_qlora_says_what_is_missing(monkeypatch):
    with pytest.raises(ConfigError, match="--adapter qlora needs a CUDA device"):
        four_bits(torch.bfloat16, "--adapter qlora", "--adapter lora")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes") as caught:
        four_bits(torch.bfloat16, "--adapter qlora", "--adapter lora")
    assert "pip install bitsandbytes" in caught.value.remedy


def test_copies_share_weights_and_keep_their_adapters_to_themselves(tiny_model):
    base = load_causal_lm(str(tiny_model)).requires_grad_(False)
    ids = torch.tensor([[5, 6, 7, 8]])
    first, second = share_weights(base), share_weights(base)
    for copied, seed in ((first, 1), (second, 2)):
        add_random_adapters(copied, seed)
    theirs = {one.data_ptr() for one in base.parameters()}
    for copied in (first, second):
        frozen = {one.data_ptr() for one in copied.parameters() if not one.requires_grad}
        assert frozen == theirs
    with torch.no_grad():
        plain = base(ids).logits
        assert not torch.allclose(first(ids).logits, second(ids).logits, atol=1e-3)
        with without_adapters(first):
            torch.testing.assert_close(first(ids).logits, plain, atol=0, rtol=0)
            assert not torch.allclose(second(ids).logits, plain, atol=1e-3)
    assert not any("lora" in name for name, _ in base.named_parameters())


def test_a_reward_model_on_a_base_scores_like_the_merged_one(tiny_model, tmp_path, adapted):
    base = describe_model(str(tiny_model))
    state = adapted.state_dict()
    tokenizer = load_tokenizer(str(tiny_model))
    merged = empty_reward_model(adapted.config, bias=0.25)
    save_model(merged, tokenizer, tmp_path / "r", merged_weights(adapted, state))
    with pytest.raises(InputError, match="has no adapters") as caught:
        require_adapters(str(tmp_path / "r"), base)
    assert "rlhf train-reward --adapter lora" in caught.value.remedy
    save_adapters(tmp_path / "r", adapted, state, base)
    require_adapters(str(tmp_path / "r"), base)
    with pytest.raises(InputError, match=r"were trained on .*tiny"):
        require_adapters(str(tmp_path / "r"), {**base, "hash": "another"})
    with pytest.raises(
        InputError, match=r"on unquantized weights, the shared base has 4-bit"
    ) as caught:
        require_adapters(str(tmp_path / "r"), base, four_bits=True)
    assert (
        caught.value.remedy == "Leave --lora.four-bit-base out, or train it with --adapter qlora."
    )
    note = tmp_path / "r/adapter/base.json"
    note.write_text(note.read_text().replace('"four_bits": false', '"four_bits": true'))
    require_adapters(str(tmp_path / "r"), base, four_bits=True)
    with pytest.raises(
        InputError, match=r"on 4-bit weights, the shared base has unquantized"
    ) as caught:
        require_adapters(str(tmp_path / "r"), base)
    assert caught.value.remedy == "Add --lora.four-bit-base, or train it with --adapter lora."
    policy = load_causal_lm(str(tiny_model)).requires_grad_(False)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    shared = load_reward_model_on(policy, str(tmp_path / "r")).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = load_reward_model(str(tmp_path / "r")).eval()(input_ids=ids).logits
        torch.testing.assert_close(shared(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert shared.config.reward_bias == 0.25
    after = policy.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_language_model_is_saved_with_its_adapters_merged_in(tiny_model, tmp_path):
    policy = add_random_adapters(load_causal_lm(str(tiny_model), torch.bfloat16))
    policy.generation_config.update(do_sample=True, temperature=0.7)
    save_merged(policy, load_tokenizer(str(tiny_model)), tmp_path / "policy")
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "policy", output_loading_info=True
    )
    assert not any(info.values())
    assert {value.dtype for value in plain.parameters()} == {torch.float32}
    assert plain.generation_config.temperature == 0.7
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = policy.float()(ids).logits
        torch.testing.assert_close(plain(ids).logits, expected, atol=1e-4, rtol=1e-3)


def test_a_seed_is_drawn_without_touching_the_generator(tiny_model):
    model = load_causal_lm(str(tiny_model))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    add_adapters(model, rank=4, alpha=8, seed=1)
    assert torch.equal(torch.rand(3), expected)
