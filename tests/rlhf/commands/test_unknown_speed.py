"""`rlhf plan --price-per-hour` says what was not measured: the speed of GPUs, and sampling."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import cli
from rlhf.commands.machine import plan
from rlhf.commands.machine.plan import Settings
from rlhf.config import flag_of
from tests.policies.training import TrainingInputs, training

__all__ = ["training"]

WAYS = (
    "Give --tflops, the speed of one GPU in large matrix products in bf16 (about 700 for an H100 "
    "SXM or H200, about 250 for an A100), or --like RUN, a short run on such GPUs."
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to measure")
@pytest.mark.parametrize("named", [{"gpus": 4}, {"gpus": 1}, {"gpu_memory": 80.0}])
def test_a_machine_without_a_gpu_says_nothing_of_what_gpus_cost(
    tiny_model: Path, named: dict[str, Any], capsys: pytest.CaptureFixture
) -> None:
    settings = Settings(model=str(tiny_model), price_per_hour=2.5, **named)
    result = plan.run(settings)
    assert result["forecast"] is None
    lines = plan.describe(settings, result).splitlines()
    assert f"No hours and no price: this machine has no GPU. {WAYS}" in lines
    assert not any("Forecast" in line or "TFLOP/s" in line for line in lines)
    flags = [word for name, value in named.items() for word in (flag_of(name), str(value))]
    words = ["plan", "--model", str(tiny_model), "--price-per-hour", "2.5", *flags, "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["forecast"] is None
    given = plan.run(replace(settings, tflops=250))["forecast"]
    assert given["tflops_from"] == "as given by --tflops"
    assert "No hours" not in plan.describe(
        replace(settings, tflops=250), {**result} | {"forecast": given}
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run would have a GPU")
def test_a_run_without_a_gpu_is_no_measure_of_one(training: TrainingInputs) -> None:
    here = Settings(model=str(training.model), price_per_hour=1, like=(training.reference,))
    assert plan.run(here)["forecast"]["tflops_from"] == f"measured by {training.reference}"
    on_gpus = replace(here, gpus=2)
    result = plan.run(on_gpus)
    assert result["forecast"] is None
    expected = f"No hours and no price: a run in --like had no GPU. {WAYS}"
    assert expected in plan.describe(on_gpus, result).splitlines()
    assert plan.run(replace(on_gpus, tflops=250))["forecast"] is not None


def test_a_run_that_sampled_nothing_says_nothing_of_sampling(
    training: TrainingInputs, tmp_path: Path
) -> None:
    def shown(reference: Path, **given: float) -> tuple[str, dict[str, Any]]:
        settings = Settings(model=str(training.model), price_per_hour=1, like=(reference,), **given)
        result = plan.run(settings)
        text = plan.describe(settings, result)
        [line] = [one for one in text.splitlines() if f"(like {reference})" in one]
        return line, result["forecast"]["stages"]["reference"]

    reused = shutil.copytree(training.reference, tmp_path / "reused")
    report = json.loads((reused / "report.json").read_text())
    report["phases"]["sampled_fraction"] = 0.0
    (reused / "report.json").write_text(json.dumps(report))
    line, stage = shown(reused)
    assert "reference           sampling 3.0% (assumed: that run did no sampling), scoring" in line
    assert line.count("assumed") == 1
    assert stage["assumed"] == ["sampling"]
    line, stage = shown(reused, sampling_utilization=0.05)
    assert "sampling 5.0%, scoring" in line
    assert stage["assumed"] == []
    line, stage = shown(training.reference)
    assert "assumed" not in line
    assert stage["assumed"] == []
