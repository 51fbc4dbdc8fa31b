"""Training goes on from a classifier of text pairs: its head is kept, everything trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from reward.scoring.texts import load_text_reward
from reward.training.train import train_reward
from rlhf.modeling.models import load_config
from rlhf.records.ranked import read_ranked
from rlhf.records.schema import RankedPrompt
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.reward.conftest import settings_for
from tests.reward.encoders import build_encoder

STILL = 1e-12  # a learning rate that changes no weight


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_encoder(tmp_path_factory.mktemp("encoder") / "model", classifier_dropout=0.5)


def logits_of(model: Path, records: list[RankedPrompt]) -> np.ndarray:
    """transformers' outputs for the four responses of every record."""
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        return np.array(
            [
                [
                    float(network(**tokenizer(r.prompt.text, a.text, return_tensors="pt")).logits)
                    for a in r.responses
                ]
                for r in records
            ]
        )


def bradley_terry(logits: np.ndarray) -> float:
    """The mean over prompts of the mean loss of six pairs, the last of which is a tie."""
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    gaps = np.stack([logits[:, a] - logits[:, b] for a, b in pairs], axis=1)
    tie = logits[:, 2] - logits[:, 3]
    losses = np.concatenate(
        [np.logaddexp(0, -gaps), (np.logaddexp(0, tie) + np.logaddexp(0, -tie))[:, None] / 2], 1
    )
    return float(losses.mean())


@pytest.mark.parametrize("changes", [{}, {"adapter": "lora"}, {"gradient_checkpointing": True}])
def test_the_first_loss_is_that_of_the_trained_head(
    rankings: Path, encoder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = settings_for(
        rankings, encoder, tmp_path / "out", prompts_per_batch=24, epochs=2, **changes
    )
    report = train_reward(settings)
    records = [one for one in read_ranked(rankings) if one.prompt.split == "train"]
    first, second = read_metrics(RunDir(settings.out).metrics_file)
    assert first["loss"] == pytest.approx(bradley_terry(logits_of(encoder, records)), abs=1e-5)
    assert second["loss"] < first["loss"]
    assert report["started_from"]["kind"] == "reward model"
    assert report["likelier_wins"] is None
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_saved_model_is_the_same_up_to_its_scale(
    rankings: Path, encoder: Path, tmp_path: Path, adapter: str
) -> None:
    out = tmp_path / "out"
    settings = settings_for(rankings, encoder, out, learning_rate=STILL, adapter=adapter)
    report = train_reward(settings)
    assert report["accuracy"] == report["accuracy_before_training"]
    records = [one for one in read_ranked(rankings) if one.prompt.split == "test"]
    before, after = (logits_of(one, records) for one in (encoder, out / "model"))
    gain = np.std(after) / np.std(before)
    assert gain > 1.05  # or nothing was scaled
    assert after == pytest.approx(gain * before, abs=1e-4)
    bias = load_config(str(out / "model")).reward_bias
    score = load_text_reward(str(out), Accelerator(cpu=True, mixed_precision="no"), 400)
    rewards = score([(one.prompt, one.responses) for one in records])
    assert np.array(rewards) == pytest.approx(after + bias, abs=1e-4)
    assert np.mean(rewards) == pytest.approx(0, abs=1e-4)
    AcceleratorState._reset_state(True)
