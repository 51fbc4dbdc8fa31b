import json
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForSequenceClassification

from reward.scoring.scorer import load_scorer
from reward.training.save import require_same_weights
from reward.training.train import train_reward
from rlhf.modeling.models import describe_model
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.run.rundir import RunDir
from tests.reward.conftest import build_record, sequences_of
from tests.reward.conftest import settings_for as small_settings


def settings_for(rankings, model, out, **changes):
    changes = {"adapter": "lora", "learning_rate": 1e-2, **changes}
    return small_settings(rankings, model, out, **changes)


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
def test_the_adapters_are_kept_as_peft_reads_them(rankings, tiny_model, tmp_path):
    train_reward(settings_for(rankings, tiny_model, tmp_path / "out", epochs=2))
    folder = tmp_path / "out/model"
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    frozen = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    adapted = PeftModel.from_pretrained(frozen, folder / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        expected, found = plain(input_ids=ids).logits, adapted(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert expected.abs().item() > 1e-3
    base = json.loads((folder / "adapter/base.json").read_text())
    assert base == {**describe_model(str(tiny_model)), "four_bits": False}
