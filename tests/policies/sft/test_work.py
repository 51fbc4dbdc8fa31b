"""What a step of `rlhf sft`, `dpo` and `distill` counts is what the profiler counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from accelerate.state import AcceleratorState
from torch.utils.flop_counter import FlopCounterMode
from transformers import DefaultFlowCallback, TrainerCallback

from rlhf.cli import main
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.policies.sft.demonstrations import LINES
from tests.policies.training import TrainingInputs, build_wide
from tests.reward.conftest import build_record, export

PROFILED = 0.05
VOCABULARY = 2000  # so that the output matrix weighs as in real models
SIZES = ("--batch-size", "4", "--micro-batch-size", "2", "--precision", "fp32", "--epochs", "1")

MEASURED = {
    *("seconds", "seconds/waiting_for_data", "seconds/waiting_for_ranks"),
    *("speed/tokens_per_second", "speed/tokens_per_pass", "speed/tflops", "speed/utilization"),
}


def add_product(_: list[int], left: list[int], right: list[int], **__: Any) -> int:
    """2·N·d·f of `addmm_`, in which trl's head adds up its gradients on CPUs."""
    return 2 * left[0] * left[1] * right[1]


UNKNOWN = {torch.ops.aten.addmm_: add_product}  # to the profiler, which has `addmm` alone


@pytest.fixture(autouse=True)
def _own_precision():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TrainingInputs:
    return build_wide(tmp_path_factory.mktemp("wide"), vocabulary=VOCABULARY, layers=4)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The profiler's count of every optimizer step of a trainer."""
    found: list[float] = []

    class Profiler(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.mode = FlopCounterMode(display=False, custom_mapping=UNKNOWN)
            self.mode.__enter__()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.mode.__exit__(None, None, None)
            found.append(float(self.mode.get_total_flops()))

    callbacks = [DefaultFlowCallback, Profiler]
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", callbacks)
    return found


def sft(wide: TrainingInputs, folder: Path) -> list[str]:
    lines = folder / "lines.jsonl"
    lines.write_text("\n".join(map(json.dumps, LINES)))
    return ["sft", "--demonstrations", str(lines), "--model", str(wide.model)]


def dpo(wide: TrainingInputs, folder: Path) -> list[str]:
    rankings = export(folder / "rankings", [build_record(number) for number in range(2)])
    return ["dpo", "--rankings", str(rankings), "--model", str(wide.model)]


def distill(wide: TrainingInputs, _: Path) -> list[str]:
    models = ("--teacher", str(wide.model), "--student", str(wide.model), "--half")
    return ["distill", *models, "--outputs", str(wide.reference)]


def distill_reward(wide: TrainingInputs, folder: Path) -> list[str]:
    words = distill(wide, folder)
    words[words.index("--teacher") + 1] = str(wide.reward)
    return words


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (sft, ()),
        (sft, ("--gradient-checkpointing",)),
        (dpo, ()),
        (dpo, ("--lora.rank", "8")),
        (distill, ("--on-policy", "0")),
        (distill, ("--on-policy", "1", "--max-new-tokens", "9")),
        (distill_reward, ()),
    ],
    ids=["sft", "checkpointing", "dpo", "dpo-LoRA", "stored", "sampled", "reward"],
)
def test_each_step_counts_what_the_profiler_counts(
    wide: TrainingInputs,
    profiled: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: Any,
    more: tuple[str, ...],
) -> None:
    """The reference pass of DPO with adapters, the teacher's, and sampling are in it."""
    run = RunDir(tmp_path / "out")
    words = [*command(wide, tmp_path), "--out", str(run.path), *SIZES, *more]
    assert main(words) == 0
    steps = read_metrics(run.metrics_file)
    assert len(steps) == len(profiled) > 0
    for row, expected in zip(steps, profiled, strict=True):
        assert row.keys() >= MEASURED
        assert 0 < row["seconds/waiting_for_data"] < row["seconds"]
        assert 1e12 * row["speed/tflops"] * row["seconds"] == pytest.approx(expected, rel=PROFILED)
    use = run.read_report()["use"]
    rate = json.loads(run.speed_file.read_text())["matmul_tflops"]
    assert use["matmul_tflops"] == pytest.approx(rate, rel=1e-2)
    assert use["seconds"] == pytest.approx(sum(row["seconds"] for row in steps), rel=1e-3)
    tokens = sum(row["speed/tokens_per_second"] * row["seconds"] for row in steps)
    assert use["tokens_per_second"] == pytest.approx(tokens / use["seconds"], rel=1e-2)
    # the passes are short, so there is something to change
    assert use["advice"][:1].upper() + use["advice"][1:] in capsys.readouterr().out
