"""What PPO needs, on the tiny model: a reward model and reference outputs, made once."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policies.ppo.settings import PPOSettings
from rlhf.cli import main
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.run.metrics import read_metrics
from tests.conftest import build_once, build_tokenizer
from tests.pipeline.loop import SHORT, without_clock, write_prompts


@dataclass(frozen=True)
class TrainingInputs:
    """Folders of the model, the reward model and the reference outputs."""

    model: Path
    reward: Path
    reference: Path

    def ppo(self, out: Path, *more: str, steps: int = 1) -> int:
        """Run `rlhf ppo` for a few short steps; its exit code."""
        return main(self.arguments(out, *more, steps=steps))

    def arguments(self, out: Path, *more: str, steps: int = 1) -> list[str]:
        """The command line of `ppo`, with the reward model unless `more` names a reward."""
        reward = () if "--reward" in more else ("--reward", str(self.reward))
        rate = () if "--learning-rate" in more else ("--learning-rate", "1e-3")
        precision = () if "--precision" in more else ("--precision", "fp32")
        return [
            *("ppo", "--model", str(self.model), "--reference", str(self.reference), *reward),
            *("--out", str(out), "--steps", str(steps), "--episodes-per-step", "4"),
            *(*precision, *rate, *more),
        ]


def build_ensemble(training: TrainingInputs, folder: Path) -> Path:
    """An ensemble of the reward model and another random one, which stands in member-1."""
    shutil.copytree(training.reward, folder)
    tokenizer = load_tokenizer(str(training.model))
    other = new_reward_model(str(training.model), int(tokenizer.pad_token_id), seed=2)
    save_model(other, tokenizer, folder / "member-1")
    return folder


def read_report(out: Path) -> dict[str, Any]:
    """The report of a stage."""
    content: dict[str, Any] = json.loads((out / "report.json").read_text())
    return content


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The metrics of a stage, without its clock."""
    return [without_clock(row) for row in read_metrics(out / "metrics.jsonl")]


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TrainingInputs:
    """The inputs around the tiny model."""
    folder = build_once(
        tmp_path_factory, "training", lambda folder: build_training(folder, tiny_model)
    )
    return TrainingInputs(tiny_model, folder / "reward", folder / "reference")


@pytest.fixture
def settings(training: TrainingInputs) -> PPOSettings:
    """Settings of PPO on the inputs."""
    return PPOSettings(
        model=str(training.model),
        reward=(str(training.reward),),
        reference=training.reference,
        out=training.reference,
        precision="fp32",
    )


def build_wide(folder: Path, *, vocabulary: int | None = None, layers: int) -> TrainingInputs:
    """Inputs around a model in which heads and small products weigh as little as in real ones.

    `vocabulary`: its tokens; by default those of its tokenizer.
    """
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return build_training(folder, folder / "model")


def build_training(folder: Path, model: Path) -> TrainingInputs:
    """A random reward model, and two reference outputs for each of twelve prompts."""
    made = TrainingInputs(model, folder / "reward", folder / "reference")
    tokenizer = load_tokenizer(str(model))
    reward = new_reward_model(str(model), int(tokenizer.pad_token_id), seed=1)
    save_model(reward, tokenizer, made.reward)
    prompts = write_prompts(folder / "prompts.jsonl")
    command = [
        *("reference", "--prompts", str(prompts), "--model", str(model), *SHORT),
        *("--reward", str(made.reward), "--out", str(made.reference), "--samples", "2"),
    ]
    assert main(command) == 0
    return made
