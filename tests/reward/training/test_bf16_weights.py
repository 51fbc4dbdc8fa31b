"""Reward models trained with bf16 weights and float32 masters."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from reward.data.groups import Group, Pair
from reward.losses import Objective
from reward.memory import plan_memory
from reward.model.module import RewardModule
from reward.settings import RewardSettings
from reward.training.step import TrainState, take_step
from reward.training.train import train_reward
from rlhf.errors import ConfigError
from rlhf.modeling.models import new_reward_model
from rlhf.parallel.distributed import start
from rlhf.parallel.master_weights import MasterOptimizer
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.planning.planner import read_shape
from rlhf.run.metrics import read_metrics
from tests.reward.conftest import settings_for
from tests.reward.encoders import build_encoder
from tests.settings import changed

GROUPS = [
    Group(str(number), (5 + number, 9), ((20, 21, 2), (22, 2)), (Pair(0, 1, 1.0, 1, "a", 1.0),))
    for number in range(4)
]


@pytest.fixture(autouse=True)
def _precision_of_its_own() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({one.untyped_storage().data_ptr(): one.nbytes for one in tensors}.values())


def test_the_plan_counts_the_bytes_that_are_held(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = start("bf16-weights", 0)
    accelerator.free_memory()
    module = RewardModule(new_reward_model(str(tiny_model), 0, seed=1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    precision = {"bf16_weights": True, "fp32_modules": module.fp32_modules}
    model, stepper = prepare(accelerator, module, optimizer, Sharding(), **precision)
    assert isinstance(stepper, MasterOptimizer)
    state = TrainState(accelerator, model, stepper, 0, 100, Objective(), shared=False)
    held: dict[str, int] = {}
    clear = stepper.zero_grad

    def measure(**how: Any) -> None:
        held["gradients"] = count_bytes(p.grad for p in module.parameters())
        assert {p.grad.dtype for p in module.parameters()} == {torch.bfloat16, torch.float32}
        clear(**how)

    monkeypatch.setattr(stepper, "zero_grad", measure)
    take_step(state, GROUPS, 1e-3)
    moments = optimizer.state.values()
    held["Adam"] = count_bytes(one[name] for one in moments for name in ("exp_avg", "exp_avg_sq"))
    held["masters"] = count_bytes(stepper.masters.parameters())
    rounded = [one for one in module.parameters() if one.dtype == torch.bfloat16]
    held["weights"] = count_bytes(rounded)
    assert all(one.grad is None for one in (*module.parameters(), *stepper.masters.parameters()))

    settings = settings_for(Path("r"), tiny_model, Path("o"), precision="bf16-weights")
    plan = plan_memory(settings, read_shape(str(tiny_model)))
    planned = {item.what.removeprefix("reward model: "): item.size for item in plan.always}
    computing = {item.what: item.size for item in plan.phases["computing gradients"]}
    assert held == planned | {"gradients": computing["gradients"]}
    assert "bf16 copies of the matrices" not in computing
    # 2 bytes less for each weight than with float32 weights, which autocast copies
    autocast = changed(settings, precision="bf16")
    assert plan.peak < plan_memory(autocast, read_shape(str(tiny_model))).peak


def losses(settings: RewardSettings) -> list[float]:
    train_reward(settings)
    return [row["loss"] for row in read_metrics(settings.out / "metrics.jsonl")]


def test_losses_are_near_those_of_autocast(
    rankings: Path, tiny_model: Path, tmp_path: Path
) -> None:
    curves = [
        losses(settings_for(rankings, tiny_model, tmp_path / name, precision=name, epochs=2))
        for name in ("bf16", "bf16-weights")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=0.05, abs=0.01)
    assert curves[0][-1] < 0.5 * curves[0][0]
    folder = tmp_path / "bf16-weights" / "model"
    saved = load_file(folder / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    norm = saved["model.layers.0.mlp.up_proj.weight"]
    assert not norm.equal(norm.bfloat16().float())  # the masters, not what they are rounded to


def test_an_encoder_trains_too(tmp_path: Path, rankings: Path) -> None:
    encoder = build_encoder(tmp_path / "encoder")
    settings = settings_for(rankings, encoder, tmp_path / "out", precision="bf16-weights")
    found = losses(settings)
    assert all(0 < one < 5 for one in found)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"adapter": "lora"}, "--adapter lora"),
        ({"adapter": "qlora"}, "--adapter qlora"),
        ({"sharding": "zero3", "processes": 2}, "--sharding zero3"),
        ({"ddp_comm_hook": "fp16"}, "--ddp-comm-hook fp16"),
        ({"tensor_parallel": 2}, "--parallel.tensor-parallel 2"),
    ],
)
def test_where_bf16_weights_do_not_go(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_for(Path("r"), Path("m"), Path("o"), precision="bf16-weights", **changes)
    assert str(caught.value) == (
        f"--precision bf16-weights cannot be combined with {named}\n"
        "  Use --precision bf16, or train all weights with --sharding ddp or fsdp."
    )
