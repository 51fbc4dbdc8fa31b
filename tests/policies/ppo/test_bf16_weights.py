"""PPO with bf16 weights and float32 masters of policy and critic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from policies.ppo.memory import plan_memory
from policies.ppo.settings import PPOSettings
from rlhf.cli import main
from rlhf.errors import ConfigError
from rlhf.planning.planner import read_shape
from tests.policies.training import TrainingInputs, metrics_of
from tests.servers.commands import run_process
from tests.servers.interrupted import kill_when
from tests.settings import changed


@pytest.fixture(autouse=True)
def _precision_of_its_own(training: TrainingInputs) -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def arguments(training: TrainingInputs, out: Path, *more: str, precision: str) -> list[str]:
    words = training.arguments(out, *more, steps=4)
    words[words.index("fp32")] = precision
    return words


def test_a_run_is_near_that_of_autocast(training: TrainingInputs, tmp_path: Path) -> None:
    rows = {}
    for precision in ("bf16", "bf16-weights"):
        assert main(arguments(training, tmp_path / precision, precision=precision)) == 0
        rows[precision] = metrics_of(tmp_path / precision)
    first = {precision: found[0] for precision, found in rows.items()}
    for name in ("loss/value", "kl/forward_k3_per_token"):
        assert first["bf16-weights"][name] == pytest.approx(first["bf16"][name], rel=0.1, abs=0.01)
    folder = tmp_path / "bf16-weights" / "policy"
    saved = load_file(folder / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    before = load_file(training.model / "model.safetensors")
    moved = [name for name in saved if not saved[name].equal(before[name])]
    assert len(moved) == len(saved)
    some = saved["model.layers.0.mlp.up_proj.weight"]
    assert not some.equal(some.bfloat16().float())  # the masters, not what they are rounded to


@pytest.mark.slow
def test_two_processes_that_shard_them_take_the_steps_of_two_that_do_not(
    training: TrainingInputs, tmp_path: Path
) -> None:
    rows = {}
    for sharding in ("ddp", "fsdp"):
        out = tmp_path / sharding
        words = arguments(training, out, "--sharding", sharding, precision="bf16-weights")
        done = run_process(*words, processes=2)
        assert done.returncode == 0, done.stderr[-4000:]
        rows[sharding] = metrics_of(out)
    for mine, theirs in zip(rows["fsdp"], rows["ddp"], strict=True):
        for name in ("loss/value", "kl/forward_k3_per_token", "reward/mean", "grad_norm/policy"):
            assert mine[name] == pytest.approx(theirs[name], rel=0.1, abs=0.01)
        assert mine["sampler_gap"] < 0.02
    saved, other = (load_file(tmp_path / one / "policy" / "model.safetensors") for one in rows)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    before = load_file(training.model / "model.safetensors")
    for name, value in saved.items():
        assert not value.equal(before[name])
        torch.testing.assert_close(value, other[name], rtol=0, atol=0.01)  # 4 steps of 1e-3


def test_killed_and_resumed_gives_the_same_policy(training: TrainingInputs, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ("--checkpoint.every", "1")
    assert main(arguments(training, whole, *options, precision="bf16-weights")) == 0
    kill_when(
        arguments(training, killed, *options, precision="bf16-weights"),
        killed / "metrics.jsonl",
        lines=2,
    )
    assert main(arguments(training, killed, *options, "--resume", precision="bf16-weights")) == 0
    assert metrics_of(killed) == metrics_of(whole)
    weights = [(out / "policy" / "model.safetensors").read_bytes() for out in (whole, killed)]
    assert weights[0] == weights[1]


@pytest.fixture
def settings(settings: PPOSettings) -> PPOSettings:
    return changed(settings, precision="bf16-weights")


def test_the_plan_names_masters(settings: PPOSettings) -> None:
    shape = read_shape(settings.model)
    text = plan_memory(settings)
    gib = {
        name: f"{size / 2**30:.4f}"
        for name, size in (
            ("policy: weights", 2 * shape.parameters),
            ("policy: masters", 4 * shape.parameters),
            ("critic: weights", 2 * shape.trunk),
            ("critic: masters", 4 * (shape.trunk + shape.hidden)),
        )
    }
    for name, size in gib.items():
        assert f"{name:<28}"[: len(name) + 1] in text
        assert any(line.split()[:3] == [*name.split(), size] for line in text.splitlines())
    assert "bf16 copies" not in text
    sharded = plan_memory(changed(settings, sharding="fsdp", processes=2))
    assert "masters" not in sharded  # the float32 shards are


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora_rank": 4}, "--lora.rank 4"),
        ({"sharding": "zero2", "processes": 2}, "--sharding zero2"),
    ],
)
def test_where_bf16_weights_do_not_go(
    settings: PPOSettings, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"bf16-weights cannot be combined with {named}"):
        changed(settings, **changes)
