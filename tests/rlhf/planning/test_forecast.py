"""Forecasts of hours and price, worked out by hand and against finished runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.errors import InputError
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.models import load_causal_lm
from rlhf.planning.flops import count_flops, take_flops
from rlhf.planning.forecast import (
    Amount,
    Operations,
    Speed,
    assumed_start,
    costs_of,
    count_operations,
    forecast,
    matrices_of,
    stride,
)
from rlhf.planning.planner import Shape, read_shape
from rlhf.planning.trial import read_trial
from rlhf.records.jsonl import write_json, write_jsonl
from rlhf.run.rundir import RunDir

SHAPE = Shape(
    parameters=500,
    trunk=460,
    linear=140,
    trunk_linear=100,
    lora_rows=20,
    layers=2,
    hidden=4,
    inner=8,
    query_width=3,
    key_width=3,
    vocabulary=10,
    gated=False,
)
AMOUNT = Amount(
    prompts=10,
    held_out=2,
    responses=2,
    samples=1,
    prompt_tokens=3,
    response_tokens=2,
    epochs=1,
    steps=5,
    episodes=4,
    updates=2,
)


def test_operations_of_a_reward_model() -> None:
    # 7 tokens of a prompt with two responses, which meet 3² + 4·5 = 29 keys:
    # forward 2·7·100 + 4·(2·3)·29 = 2096, backward 2·7·200 + 8·6·29 = 4192; logits 2·2·4·10 = 160
    found = count_operations("reward", SHAPE, AMOUNT)
    assert found.steps == {"training": 10 * (2096 + 4192)}
    assert found.around == {"training": 2 * (3 * 2096 + 2 * 160)}
    twice = count_operations("reward", SHAPE, AMOUNT.changed({"epochs": 2.0}))
    assert twice.steps["training"] == 2 * found.steps["training"]


def test_operations_of_reference_outputs() -> None:
    # sampled: 2·5·100 + 4·6·(3² + 2·(3 + 1)) + 160 = 1568; read: 2·5·100 + 4·6·(3² + 2·5) = 1456
    # by the original, and by the reward model
    found = count_operations("reference", SHAPE, AMOUNT)
    assert found.steps == {"sampling": 12 * 1568, "scoring": 12 * (2 * 1456 + 160)}
    assert found.around == {}
    # 2·11·100 + 4·6·(3² + 8·(3 + 1)) + 640 = 3824; read: 2·11·100 + 4·6·(3² + 8·5) = 3376
    found = count_operations("reference", SHAPE, AMOUNT.changed({"samples": 4}))
    assert found.steps == {"sampling": 12 * 3824, "scoring": 12 * (2 * 3376 + 640)}


def test_operations_of_ppo() -> None:
    # backward 2·5·200 + 8·6·5² = 3200; the policy with four times the logits 1600 + 3200 + 640
    found = count_operations("ppo", SHAPE, AMOUNT)
    training = 20 * 2 * (5440 + 4800 + 5440 / 2)
    assert found.steps == {"sampling": 20 * 1568, "scoring": 20 * 4960, "training": training}
    # two held-out prompts are answered and read four times with logits; the critic reads 10 rows
    assert found.around == {"sampling": 2 * 1568, "scoring": 2 * 4 * 1760 + 10 * 1600}


def test_adapters_are_multiplied_and_alone_have_gradients() -> None:
    # 20 numbers for rank 1: forward 2·5·120 + 600 = 1800, backward 2·5·(120 + 20) + 1200 = 2600
    found = costs_of(matrices_of(SHAPE, 1), SHAPE, AMOUNT)
    assert (found.read, found.learned) == (1800, 2600)
    policy = 1800 + 2600 + 3 * 160  # the output matrix has no gradient
    steps = count_operations("ppo_lora", SHAPE, AMOUNT, 1).steps
    assert steps["training"] == 20 * 2 * (policy + 4400 + policy / 2)
    assert count_operations("ppo", SHAPE, AMOUNT, 1).steps != steps


def test_operations_of_fine_tuning() -> None:
    # read with logits 1600 + 160; learned 3200, and the logits three times again
    found = count_operations("sft", SHAPE, AMOUNT)
    assert found.steps == {"training": 10 * (1760 + 3200 + 480)}
    assert found.around == {"training": 2 * 2 * 1760}
    twice = count_operations("sft", SHAPE, AMOUNT.changed({"epochs": 2.0}))
    assert twice.steps["training"] == 2 * found.steps["training"]
    assert twice.around == found.around


def test_operations_of_dpo() -> None:
    # of two responses one pair: two answers as in fine-tuning, which the original reads once
    found = count_operations("dpo", SHAPE, AMOUNT)
    assert found.steps == {"training": 10 * 2 * 5440}
    assert found.around == {"training": 10 * 2 * 1760 + 2 * 2 * (1760 + 1760)}
    # with adapters of rank 1 (1800 and 2600, as above) it reads them in every step
    adapted = count_operations("dpo_lora", SHAPE, AMOUNT, 1)
    assert adapted.steps == {"training": 10 * 2 * (1960 + 2600 + 2 * 160 + 1760)}
    assert adapted.around == {"training": 2 * 2 * (1960 + 1760)}
    # all pairs of four responses are six, unless it is known how many there are
    four = count_operations("dpo", SHAPE, AMOUNT.changed({"responses": 4.0}))
    assert four.steps["training"] == 6 * found.steps["training"]
    fewer = count_operations("dpo", SHAPE, AMOUNT.changed({"responses": 4.0, "pairs": 2.5}))
    assert fewer.steps["training"] == 2.5 * found.steps["training"]


def test_operations_of_distillation() -> None:
    # the student, of one layer: read 2·5·50 + 4·3·5² = 800, learned 1000 + 8·3·5² = 1600,
    # sampled 500 + 4·3·17 + 160 = 864; logits of all five tokens 2·5·4·10 = 400
    student = replace(SHAPE, trunk_linear=50, layers=1)
    found = count_operations("distill", SHAPE, AMOUNT, student=student)
    both = 800 + 400 + 1600 + 400
    assert found.steps == {"sampling": 10 * 864 / 2, "training": 10 * (both + 1600 + 2 * 400)}
    assert found.around == {"training": 2 * 2 * both}
    more = AMOUNT.changed({"samples": 3, "on_policy": 0.0})
    stored = count_operations("distill", SHAPE, more, student=student)
    assert stored.steps == {"sampling": 0, "training": 3 * found.steps["training"]}


def test_hours_and_price_of_two_devices() -> None:
    operations = Operations({"sampling": 18_000.0, "scoring": 40_000.0}, {"scoring": 5_000.0})
    speed = Speed(1000.0, {"sampling": 0.1, "scoring": 0.5, "training": 0.3}, 3.0)
    found = forecast(operations, speed, 2, 7200.0)
    # 180 s + 90 s of work, and both devices wait for 3 s
    assert found.seconds == {"sampling": 180.0, "scoring": 90.0}
    assert found.device_hours == pytest.approx(276 / 3600)
    assert found.hours == pytest.approx(138 / 3600)
    assert found.price == pytest.approx(2 * 276)


def test_models_are_loaded_at_a_gigabyte_a_second() -> None:
    large = Shape(**{**vars(SHAPE), "parameters": 10**9})
    assert assumed_start("reward", large) == 16.0
    assert assumed_start("reference", large) == 8.0


@pytest.mark.parametrize(("prompts", "every"), [(0, 1), (999, 1), (2500, 2), (10_000, 10)])
def test_lengths_are_counted_of_about_a_thousand_prompts(prompts: int, every: int) -> None:
    assert stride(prompts) == every


def test_formulas_count_what_a_model_does(tiny_model: Path) -> None:
    model = load_causal_lm(str(tiny_model))
    count_flops(model)
    vocabulary = int(model.config.vocab_size)
    ids = torch.arange(10) % vocabulary
    sequences = Sequences.of([ids[:4].tolist()], [ids[4:].tolist()], 0)
    take_flops()
    found = response_log_probs(model, sequences, 1.0)
    found.first(sequences.responses.mask).sum().backward()
    amount = Amount(prompt_tokens=4, response_tokens=6)
    shape = read_shape(str(tiny_model))
    cost = costs_of(matrices_of(shape, None), shape, amount)
    expected = cost.read + cost.learned + 4 * cost.logits
    assert take_flops().flops == pytest.approx(expected, rel=1e-6)


def finished(folder: Path, stage: str, model: Path, seconds: float, report: dict[str, Any]) -> Path:
    """The folder of a finished run on two processes."""
    folder.mkdir(parents=True)
    inputs = {name: {"path": str(model), "hash": "h"} for name in ("model", "teacher")}
    content = {"stage": stage, "status": "done", "inputs": inputs, "processes": 2}
    write_json(folder / "stage.json", {**content, "device_seconds": seconds})
    (folder / "config.yaml").write_text("adapter: none\nlora:\n  rank: 8\n")
    write_json(folder / "report.json", report)
    return folder


def again(path: Path, model: Path, rank: int | None = None) -> float:
    """Device-seconds that a run would take by its own speed."""
    trial = read_trial(RunDir(path))
    operations = count_operations(
        trial.stage, read_shape(str(model)), Amount(**trial.reported), rank
    )
    return forecast(operations, trial.speed, 2, 1.0).device_hours * 3600


def test_a_run_forecasts_itself(tiny_model: Path, tmp_path: Path) -> None:
    amount = {**vars(AMOUNT), "responses": 2.5}
    report = {"amount": amount, "use": {"matmul_tflops": 0.001}, "training_seconds": 40.0}
    run = finished(tmp_path / "reward", "reward", tiny_model, 120.0, report)
    trial = read_trial(RunDir(run))
    assert (trial.stage, trial.reported["responses"]) == ("reward", 2.5)
    operations = count_operations("reward", read_shape(str(tiny_model)), Amount(**trial.reported))
    # two processes share the operations of 40 s at 10⁹ a second
    use = operations.steps["training"] / 2 / 40e9
    assert trial.speed.utilization["training"] == pytest.approx(use)
    held_out = operations.around["training"] / 2 / (use * 1e9)
    assert trial.speed.start == pytest.approx(120 / 2 - 40 - held_out)
    assert again(run, tiny_model) == pytest.approx(120.0)


def test_so_do_reference_outputs_and_ppo_with_adapters(tiny_model: Path, tmp_path: Path) -> None:
    phases = {"matmul_tflops": 0.001, "sampling_seconds": 30.0, "scoring_seconds": 5.0}
    report = {"amount": vars(AMOUNT), "phases": {**phases, "sampled_fraction": 1.0}}
    run = finished(tmp_path / "reference", "reference", tiny_model, 80.0, report)
    assert again(run, tiny_model) == pytest.approx(80.0)
    report = {"amount": vars(AMOUNT), "use": {"matmul_tflops": 0.001}}
    run = finished(tmp_path / "ppo", "ppo", tiny_model, 2000.0, report)
    row = {"seconds/sample": 50.0, "seconds/score": 25.0, "seconds/update": 75.0}
    usual = {**row, "seconds/sample": 30.0}
    write_jsonl(run / "metrics.jsonl", [row, row, usual, usual])
    trial = read_trial(RunDir(run))
    assert trial.stage == "ppo_lora"
    assert again(run, tiny_model, 8) == pytest.approx(2000.0)
    steps = count_operations("ppo_lora", read_shape(str(tiny_model)), AMOUNT, 8).steps
    for phase, seconds in (("sampling", 30), ("scoring", 25), ("training", 75)):
        # two processes, and four steps as long as the last: in the first two memory is allocated
        use = steps[phase] / 2 / (4 * seconds * 1e9)
        assert trial.speed.utilization[phase] == pytest.approx(use)


@pytest.mark.parametrize("stage", ["sft", "dpo", "distill"])
def test_so_do_trainings_with_one_clock(tiny_model: Path, tmp_path: Path, stage: str) -> None:
    report = {"amount": vars(AMOUNT), "use": {"matmul_tflops": 0.001}}
    run = finished(tmp_path / stage, stage, tiny_model, 100.0, report)
    (run / "policy").symlink_to(tiny_model)
    write_jsonl(run / "metrics.jsonl", [{"seconds": 12.0}, {"seconds": 30.0}])
    rank = 8 if stage == "dpo" else None
    if stage != "dpo":
        (run / "config.yaml").write_text("epochs: 1\n")
    trial = read_trial(RunDir(run))
    assert trial.stage == ("dpo_lora" if rank else stage)
    assert again(run, tiny_model, rank) == pytest.approx(100.0)
    uses = trial.speed.utilization
    if stage == "distill":  # sampling and training took 42 s together
        assert uses["training"] == pytest.approx(10 * uses["sampling"])
        shape = read_shape(str(tiny_model))
        steps = count_operations("distill", shape, AMOUNT).steps
        taken = sum(steps[phase] / (1e9 * uses[phase]) for phase in steps)
        assert taken == pytest.approx(2 * 42.0)


def test_reused_responses_are_not_counted_as_sampled(tiny_model: Path, tmp_path: Path) -> None:
    phases = {"matmul_tflops": 0.001, "sampling_seconds": 30.0, "scoring_seconds": 5.0}
    report = {"amount": vars(AMOUNT), "phases": {**phases, "sampled_fraction": 1.0}}
    whole = finished(tmp_path / "whole", "reference", tiny_model, 80.0, report)
    report = {"amount": vars(AMOUNT), "phases": {**phases, "sampled_fraction": 0.5}}
    half = finished(tmp_path / "half", "reference", tiny_model, 80.0, report)
    uses = [read_trial(RunDir(run)).speed.utilization["sampling"] for run in (whole, half)]
    assert uses[0] == pytest.approx(2 * uses[1])


def test_a_relative_path_is_that_of_where_the_run_was_started(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begun" / "models").mkdir(parents=True)
    link = tmp_path / "begun" / "models" / "small"
    link.symlink_to(tiny_model)
    report = {"amount": vars(AMOUNT), "use": {"matmul_tflops": 0.001}, "training_seconds": 40.0}
    run = finished(tmp_path / "begun" / "runs" / "one", "reward", Path("models/small"), 9.0, report)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{config}out: runs/one\n")
    monkeypatch.chdir(tmp_path)
    assert read_trial(RunDir(run)).parameters == read_shape(str(tiny_model)).parameters
    link.unlink()
    for out, folder in (
        ("runs/one", tmp_path / "begun"),
        ("/elsewhere/one", "the folder in which that run was started"),
    ):
        (run / "config.yaml").write_text(f"{config}out: {out}\n")
        with pytest.raises(InputError) as caught:
            read_trial(RunDir(run))
        assert str(caught.value) == (
            f"{run} was started with the model models/small, which is not there\n"
            f"  If it is a folder, its path is relative to {folder}: restore it there, or type "
            "this command where models/small is. If it is a name on the hub, check the connection."
        )


def test_a_run_that_says_too_little_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a finished run of train-reward, reference, ppo"):
        read_trial(RunDir(tmp_path))
    old = finished(tmp_path / "old", "reward", tiny_model, 1.0, {"accuracy": None})
    with pytest.raises(InputError, match="does not say how much it did") as refused:
        read_trial(RunDir(old))
    assert "make a short run for this, or give --tflops and " in str(refused.value)
    curve = {"amount": vars(AMOUNT), "use": {"matmul_tflops": 1.0}, "learning_curve": {}}
    parts = finished(tmp_path / "parts", "reward", tiny_model, 1.0, curve)
    with pytest.raises(InputError, match="does not say how much it did and how fast"):
        read_trial(RunDir(parts))
    bare = finished(tmp_path / "bare", "ppo", tiny_model, 1.0, {"amount": vars(AMOUNT)})
    with pytest.raises(InputError, match="does not say how much it did and how fast"):
        read_trial(RunDir(bare))
