from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft.tuners.lora import LoraLayer
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForSequenceClassification

from reward.adapters import add_adapters, four_bits, merged_weights
from reward.finish import require_same_weights
from reward.scoring import load_scorer
from reward.settings import RewardSettings
from reward.train import train_reward
from rlhf.errors import ConfigError
from rlhf.models import new_reward_model
from rlhf.rundir import RunDir
from rlhf.tokens import load_tokenizer, pad_right

from .conftest import build_record, sequences_of


def settings_for(rankings, model, out, **changes):
    values = {"precision": "fp32", "prompts_per_batch": 4, "learning_rate": 1e-2, **changes}
    return RewardSettings(rankings=rankings, model=str(model), out=out, adapter="lora", **values)


@pytest.fixture
def adapted(tiny_model):
    """A classifier whose adapters say something: fresh ones are 0."""
    classifier = new_reward_model(str(tiny_model), 0, seed=0)
    add_adapters(classifier, rank=4, alpha=8, seed=1)
    torch.manual_seed(0)
    for name, value in classifier.named_parameters():
        if "lora_B" in name:
            value.data.normal_(std=0.1)
    return classifier


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


def test_what_is_saved_is_a_plain_classifier_with_the_rewards_of_training(
    rankings, tiny_model, tmp_path
):
    report = train_reward(settings_for(rankings, tiny_model, tmp_path / "out", epochs=4))
    assert report["accuracy"]["value"] > 0.8
    folder = tmp_path / "out/model"
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values())
    tokenizer = load_tokenizer(str(tiny_model))
    records = [build_record(n, "test") for n in range(0, 32, 4)]
    batch = pad_right(sequences_of(records, tokenizer), 0)
    with torch.no_grad():
        logits = plain.eval()(input_ids=batch.ids).logits[:, 0]
    scorer = load_scorer(str(tmp_path / "out"), Accelerator(mixed_precision="no"))
    rewards = scorer(batch)
    torch.testing.assert_close(logits + plain.config.reward_bias, rewards, atol=1e-5, rtol=0)
    # the scale was fitted on the adapted model: the merged one gives the same rewards
    assert rewards.mean().item() == pytest.approx(0, abs=1e-4)
    assert rewards.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    frozen = AutoModelForSequenceClassification.from_pretrained(str(tiny_model), num_labels=1)
    torch.testing.assert_close(plain.model.embed_tokens.weight, frozen.model.embed_tokens.weight)


@pytest.fixture
def _other_precision():
    """The library holds one precision for a whole process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("_other_precision")
def test_beside_bf16_weights_the_saved_model_is_float32(rankings, tiny_model, tmp_path):
    out = tmp_path / "out"
    report = train_reward(settings_for(rankings, tiny_model, out, epochs=4, precision="bf16"))
    assert report["accuracy"]["value"] > 0.8
    plain = AutoModelForSequenceClassification.from_pretrained(out / "model")
    assert {value.dtype for value in plain.parameters()} == {torch.float32}


def test_a_checkpoint_holds_what_is_trained_and_resumes_exactly(rankings, tiny_model, tmp_path):
    whole = settings_for(rankings, tiny_model, tmp_path / "whole", epochs=3, save_every=4)
    train_reward(whole)
    state = tmp_path / "whole/checkpoints/step-000016/state"
    saved = FileSystemReader(state).read_metadata().state_dict_metadata
    weights = {name for name in saved if name.startswith("model.")}
    assert len(weights) == 1 + 2 * 2 * 7
    assert all(".lora_" in name or name.endswith("score.weight") for name in weights)

    half = replace(whole, out=tmp_path / "half", resume=True)
    RunDir(half.out).checkpoints.parent.mkdir()
    for name in ("config.yaml", "stage.json", "metrics.jsonl", "checkpoints"):
        (tmp_path / "whole" / name).rename(tmp_path / "half" / name)
    stage = RunDir(half.out).stage_file
    stage.write_text(stage.read_text().replace('"done"', '"interrupted"'))
    train_reward(half)
    state = AutoModelForSequenceClassification.from_pretrained(whole.out / "model").state_dict()
    require_same_weights(RunDir(half.out).model, state)


def test_qlora_says_what_is_missing(monkeypatch):
    with pytest.raises(ConfigError, match="--adapter qlora needs a CUDA device"):
        four_bits(torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes") as caught:
        four_bits(torch.bfloat16)
    assert "pip install bitsandbytes" in caught.value.remedy
