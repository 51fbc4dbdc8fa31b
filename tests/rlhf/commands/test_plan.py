import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest

from policies.ppo.settings import PPOSettings
from policies.reference.settings import ReferenceSettings
from reward.settings import RewardSettings
from rlhf import cli
from rlhf.commands.machine import plan
from rlhf.commands.machine.forecasting import forecasts
from rlhf.commands.machine.plan import AmountSettings, Settings, read_student
from rlhf.config import flag_of
from rlhf.config.paths import setting_names
from rlhf.errors import InputError
from rlhf.planning.forecast import TITLES, Amount
from rlhf.planning.planner import read_shape
from rlhf.run.rundir import RunDir
from tests.policies.sft.demonstrations import LINES
from tests.policies.training import TrainingInputs, training
from tests.reward.conftest import build_record, export

__all__ = ["training"]

MODEL = Path(__file__).parents[3] / "examples" / "six_billion" / "llama_6b"


def test_a_small_model_fits_everywhere(tiny_model: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--model", str(tiny_model), "--batch", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("parameters. GiB on each device; * fits, with a tenth kept free.")
    assert lines[1] == (
        "A forward pass: 1 sequence of 1,024 tokens, without gradient checkpointing."
    )
    assert lines[3].split() == ["reward", "reference", "ppo"]
    # one process shards nothing
    rows = [(line[:17].rstrip(), line[17:].split()) for line in lines[4:7]]
    assert [name for name, _ in rows] == ["DDP", "DDP bf16-weights", "LoRA"]
    assert all(cell.endswith("*") for _, cells in rows for cell in cells)
    assert lines[8].startswith("Fine-tuning, which shards nothing: sft ")
    assert lines[8].count("*") == 4
    assert [one.split()[0] for one in lines[8].partition(": ")[2].split(", ")] == [
        *("sft", "dpo", "dpo", "distill")
    ]
    assert lines[10:12] == [
        "Recommended (all weights if they fit; if not, adapters; if not, vLLM for PPO's sampling):",
        "  reward: DDP, up to 1024 sequences in a forward pass.",
    ]


def test_a_plus_marks_what_fits_with_a_lighter_pass(capsys: pytest.CaptureFixture) -> None:
    """Of 160 GiB, 144 are used: DDP of six billion parameters takes 148 for the reward model."""

    def shown(*more: str) -> tuple[dict[str, list[str]], str]:
        assert cli.main(["plan", "--model", str(MODEL), "--gpu-memory", "160", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = {line[:17].rstrip(): line[17:].split() for line in lines[4:7]}
        return {name: [one[-1] for one in cells] for name, cells in rows.items()}, lines[7]

    marks, below = shown()
    assert [marks[name][:2] for name in ("DDP", "LoRA")] == [["+", "*"], ["*", "*"]]
    assert marks["DDP"][2] not in "+*"  # PPO holds a critic, too
    assert below == (
        "+ fits with fewer sequences in a pass or, in training, --batch.gradient-checkpointing."
    )
    marks, below = shown("--gradient-checkpointing", "--batch", "1")
    assert (marks["DDP"][:2], below) == (["*", "*"], "")


def test_several_devices_can_shard(tiny_model: Path) -> None:
    settings = Settings(model=str(tiny_model), gpus=2)
    lines = plan.describe(settings, plan.run(settings)).splitlines()
    assert [line[:17].rstrip() for line in lines[4:12]] == [
        *("DDP", "DDP bf16-weights", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "FSDP bf16-weights"),
        "LoRA",
    ]


def test_what_to_do_when_nothing_fits(tiny_model: Path) -> None:
    settings = Settings(model=str(tiny_model), gpu_memory=1e-6)
    result = plan.run(settings)
    assert not any(fits for row in result["fits"].values() for fits in row.values())
    assert [hint.split(":")[0] for hint in result["advice"]] == ["reward", "reference", "ppo"]
    last = plan.describe(settings, result).splitlines()[-3:]
    assert last == [f"  {hint}" for hint in result["advice"]]
    assert result["commands"] == {}


@pytest.mark.parametrize(
    ("gpus", "begins", "ends"),
    [
        (1, "rlhf ppo --model", "--batch.micro-batch-size 1024 --sampling.batch-size 1024"),
        (4, "rlhf ppo --model", "--sampling.batch-size 1024 --processes 4"),
        (
            16,
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
            "HOST:29501 -m rlhf.cli ppo --model",
            "--sampling.engine vllm --batch.micro-batch-size 1024 --sampling.batch-size 1024",
        ),
    ],
)
def test_it_prints_commands_to_type(tiny_model: Path, gpus: int, begins: str, ends: str) -> None:
    settings = Settings(model=str(tiny_model), gpus=gpus, engine="vllm")
    result = plan.run(settings)
    command = result["commands"]["ppo"]
    assert command.startswith(begins)
    assert command.endswith(ends)
    text = plan.describe(settings, result)
    assert all(f"  {one}\n" in f"{text}\n" for one in result["commands"].values())
    shown = text.partition("PPO as recommended, GiB in each phase:\n")[2].partition("\n\n")[0]
    phases = {line[12:]: float(line[:12]) for line in shown.splitlines()}
    assert list(phases) == [
        *("sampling", "reading the rollout", "measuring the KL", "auditing"),
        *("computing gradients", "stepping"),
    ]
    assert max(phases.values()) > result["gib"]["DDP"]["ppo"]  # 1024 sequences in place of 8


def test_gradients_in_bf16_are_half_as_many_bytes(tiny_model: Path) -> None:
    settings = Settings(model=str(tiny_model), gpus=2)
    rounded = plan.run(replace(settings, reduce_dtype="bf16"))
    assert rounded["commands"]["reward"].count("--parallel.reduce-dtype bf16") == 1
    wide, half = plan.run(settings)["sent_gib"]["DDP"], rounded["sent_gib"]["DDP"]
    assert half == {stage: pytest.approx(gib / 2, abs=1e-3) for stage, gib in wide.items()}


def test_what_processes_take_that_hold_a_model_together(tiny_model: Path) -> None:
    hints = plan.run(Settings(model=str(tiny_model), gpus=2, tensor_parallel=2))["advice"]
    assert len(hints) == 4
    assert hints[-1].startswith("reward: --parallel.tensor-parallel 2 holds 0.")


@pytest.mark.parametrize(
    ("gpus", "nodes", "each"), [(9, 3, 3), (12, 2, 6), (13, 13, 1), (64, 8, 8)]
)
def test_a_command_of_several_machines_starts_all_processes(
    gpus: int, nodes: int, each: int
) -> None:
    found = plan.command("ppo", "m", ("--steps 2",), gpus)
    assert found.startswith(f"torchrun --nnodes {nodes} --nproc-per-node {each} ")


@pytest.mark.parametrize("engine", ["generate", "vllm"])
@pytest.mark.parametrize("gpu_memory", [0.0025, 0.005, 0.02, 80.0])
def test_every_flag_of_a_command_is_one_of_its_settings(
    tiny_model: Path, gpu_memory: float, engine: Literal["generate", "vllm"]
) -> None:
    settings = Settings(
        model=str(tiny_model), gpus=8, gpu_memory=gpu_memory, engine=engine, sequence_length=64
    )
    known = {"train-reward": RewardSettings, "reference": ReferenceSettings, "ppo": PPOSettings}
    commands = plan.run(settings)["commands"]
    assert len(commands) > (gpu_memory > 0.0025)
    for command in commands.values():
        program, name, *words = command.split()
        assert program == "rlhf"
        flags = {word for word in words if word.startswith("--")}
        assert flags <= {flag_of(one) for one in setting_names(known[name])}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "none"], "error none is not a model (no such folder)"),
        (["--model", "m", "--gpus", "0"], "error --gpus is 0"),
        (
            ["--model", "m", "--gpus", "8", "--shard-group", "3"],
            "error --shard-group 3 does not divide --gpus 8",
        ),
        (
            ["--model", "m", "--reduce-dtype", "bf16"],
            "error --reduce-dtype bf16 has no effect with --gpus 1",
        ),
        (
            ["--model", "m", "--tflops", "300"],
            "error --tflops has no effect without --network or --price-per-hour",
        ),
        (["--model", "m", "--network", "50"], "error --network has no effect without --tflops"),
        (["--model", "m", "--gpu-memory", "0"], "error --gpu-memory is 0"),
        (["--model", "m", "--price-per-hour", "-1"], "error --price-per-hour is -1"),
        (["--model", "m", "--utilization", "2"], "error --utilization is 2"),
        (["--model", "m", "--amount.steps", "0"], "error --amount.steps is 0"),
        (["--model", "m", "--amount.on-policy", "2"], "error --amount.on-policy is 2"),
        (
            ["--model", "m", "--utilization", ".5", "--amount.steps", "9"],
            "error --utilization and --amount.steps have no effect without --price-per-hour",
        ),
        (
            ["--model", "m", "--engine-tensor-parallel", "2"],
            "error --engine-tensor-parallel 2 does nothing with --engine generate",
        ),
        (
            ["--model", "m", "--gpus", "3", "--engine", "vllm", "--engine-tensor-parallel", "2"],
            "error --engine-tensor-parallel 2 does not divide --gpus 3",
        ),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture, words: list[str], message: str) -> None:
    assert cli.main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_forecast_says_what_it_assumes(tiny_model: Path) -> None:
    settings = Settings(
        model=str(tiny_model),
        gpus=4,
        tflops=0.001,
        price_per_hour=2.5,
        sampling_utilization=0.01,
        amount=AmountSettings(prompts=200, steps=30, response_tokens=50),
    )
    result = plan.run(settings)
    lines = plan.describe(settings, result).splitlines()
    at = lines.index("Forecast of what each stage takes, on all devices together, and costs:")
    rows = {line[2:22].strip(): line[22:].split() for line in lines[at + 2 : at + 11]}
    assert list(rows) == [
        *("train-reward", "train-reward, LoRA", "reference", "ppo", "ppo, LoRA"),
        *("sft", "dpo", "dpo, LoRA", "distill"),
    ]
    hours, each, price = map(float, rows["ppo"][:3])
    assert each == pytest.approx(hours / 4, rel=0.01)
    assert price == pytest.approx(2.5 * hours, rel=0.01)
    assert rows["ppo"][3:] == ["30", "steps", "of", "64", "responses", "of", "50", "tokens"]
    assert rows["reference"][3] == "300"  # with 100 held-out prompts
    assert " ".join(rows["sft"][3:]) == (
        "1 × 200 demonstrations of 50 tokens to prompts of 128 tokens"
    )
    assert " ".join(rows["dpo"][3:]) == (
        "1 × 200 prompts of 128 tokens with 6 pairs of responses of 50 tokens"
    )
    assert " ".join(rows["distill"][3:]) == (
        "1 × 200 outputs of 50 tokens, 50% of them the student's"
    )
    text = "\n".join(lines)
    assert "matrices at 0.001 TFLOP/s (as given by --tflops), and of this uses:" in text
    assert "ppo                 sampling 1.0%, scoring 30.0%, training 30.0%; 0.00" in text
    assert "Devices divide the work without loss" in text
    assert "For a closer forecast make a short run of each stage and name it: --like RUN." in text
    shape = read_shape(str(tiny_model))
    twice = forecasts(replace(settings, utilization=0.6), shape, shape, 2.5)
    now, before = (f["stages"]["reward"]["seconds"] for f in (twice, result["forecast"]))
    assert now["training"] == pytest.approx(before["training"] / 2)
    assert plan.run(Settings(model=str(tiny_model)))["forecast"] is None


def test_without_a_rate_that_of_this_machine_is_measured(tiny_model: Path) -> None:
    found = plan.run(Settings(model=str(tiny_model), price_per_hour=1))["forecast"]
    assert found["tflops_from"] == "measured here"
    assert found["matmul_tflops"] > 0


def fine_tune(training: TrainingInputs, rankings: Path, folder: Path) -> None:
    """Short runs of what trl trains."""
    lines = folder / "lines.jsonl"
    lines.write_text("\n".join(map(json.dumps, LINES)))
    sizes = ("--batch-size", "2", "--micro-batch-size", "2", "--precision", "fp32")
    model = ("--model", str(training.model))
    distill = ("--teacher", str(training.model), "--student", str(training.model), "--half")
    for command, words in (
        ("sft", ("--demonstrations", str(lines), *model)),
        ("dpo", ("--rankings", str(rankings), *model)),
        ("distill", (*distill, "--outputs", str(training.reference), "--on-policy", "1")),
    ):
        assert cli.main([command, *words, *sizes, "--out", str(folder / command)]) == 0


def test_a_forecast_like_a_run_is_what_that_took(training: TrainingInputs, tmp_path: Path) -> None:
    rankings = export(tmp_path / "rankings", [build_record(n) for n in range(6)])
    words = ["--rankings", str(rankings), "--model", str(training.model), "--precision", "fp32"]
    assert cli.main(["train-reward", *words, "--out", str(tmp_path / "reward")]) == 0
    # fewer prompts than a batch: still one pass over them
    assert RunDir(tmp_path / "reward").read_report()["amount"]["epochs"] == 1
    assert training.ppo(tmp_path / "ppo", steps=2) == 0
    fine_tune(training, rankings, tmp_path)
    names = ("reward", "ppo", "sft", "dpo", "distill")
    runs = {"reference": training.reference} | {name: tmp_path / name for name in names}
    like = tuple(runs.values())
    settings = Settings(model=str(training.model), price_per_hour=3600, like=like)
    found = plan.run(settings)["forecast"]
    for stage, run in runs.items():
        one = found["stages"][stage]
        assert one["like"] == str(run)
        assert one["price"] == pytest.approx(RunDir(run).read_stage()["device_seconds"], rel=0.02)
    assert found["tflops_from"] == f"measured by {training.reference}"
    # all outputs of a prompt are read
    assert found["stages"]["dpo"]["amount"]["pairs"] == 5  # of four responses, of which two tie
    amount = found["stages"]["distill"]["amount"]
    stored = RunDir(runs["distill"]).read_report()["outputs"]
    for split, name in (("train", "prompts"), ("test", "held_out")):
        assert amount[name] == found["stages"]["reference"]["amount"][name]
        assert amount[name] * amount["samples"] == stored[split]
    assert amount["on_policy"] == 1
    assert plan.run(replace(settings, like=like[::-1]))["forecast"]["stages"] == found["stages"]
    others = plan.run(replace(settings, like=(runs["sft"], runs["distill"])))["forecast"]["stages"]
    assert others["reward"]["amount"] == asdict(Amount())
    longer = replace(settings, amount=AmountSettings(steps=4, epochs=3))
    one, other = plan.run(longer)["forecast"]["stages"], found["stages"]
    assert one["ppo"]["seconds"]["training"] == pytest.approx(
        2 * other["ppo"]["seconds"]["training"]
    )
    assert one["ppo"]["start_seconds"] == pytest.approx(other["ppo"]["start_seconds"], abs=0.5)
    assert one["reference"]["price"] == pytest.approx(other["reference"]["price"], rel=0.2)
    text = plan.describe(longer, plan.run(longer))
    assert "make a short run" not in text
    assert f"(like {runs['reference']})" in text
    for sibling in ("reward", "ppo", "dpo"):  # with adapters: the same speed and size
        with_adapters = found["stages"][f"{sibling}_lora"]
        assert with_adapters["utilization"] == found["stages"][sibling]["utilization"]
        assert with_adapters["amount"] == found["stages"][sibling]["amount"]
        assert f"(like {runs[sibling]}, a run of {TITLES[sibling]})" in text
    twice = replace(settings, like=(runs["ppo"], runs["ppo"]))
    with pytest.raises(InputError, match="are both runs of ppo\n  Give one --like for each stage"):
        plan.run(twice)


def test_the_student_is_half_of_its_teacher_or_another_model(
    tiny_model: Path, training: TrainingInputs
) -> None:
    settings = Settings(model=str(training.model), price_per_hour=1, tflops=0.001)
    half, whole = (
        plan.run(replace(settings, student=student)) for student in (None, str(training.model))
    )
    assert read_student(settings).layers == read_shape(str(training.model)).layers / 2
    assert half["fine_tuning_gib"]["distill"] < whole["fine_tuning_gib"]["distill"]
    stages = [one["forecast"]["stages"] for one in (half, whole)]
    assert stages[0]["distill"]["price"] < stages[1]["distill"]["price"]
    assert stages[0]["sft"] == stages[1]["sft"]


def test_stages_without_a_short_run_take_the_size_of_the_others(
    training: TrainingInputs,
) -> None:
    settings = Settings(
        model=str(training.model), price_per_hour=1, tflops=0.001, like=(training.reference,)
    )
    result = plan.run(settings)
    stages = result["forecast"]["stages"]
    assert stages["ppo"]["like"] is None
    assert stages["ppo"]["utilization"] == {"sampling": 0.03, "scoring": 0.3, "training": 0.3}
    for name in ("prompt_tokens", "response_tokens", "prompts"):
        [value] = {one["amount"][name] for one in stages.values()}
        assert value == RunDir(training.reference).read_report()["amount"][name]
    assert "make a short run of each stage and name it" in plan.describe(settings, result)


def dry_run(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert cli.main([*words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_dry_runs_of_the_trainings_show_their_plans(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = ["--model", str(tiny_model), "--out", str(tmp_path / "out")]
    shown = dry_run(capsys, "train-reward", *model, "--rankings", "r", "--processes", "2")
    assert "# Memory of each process for the reward model" in shown
    shown = dry_run(capsys, "reference", *model, "--prompts", "p", "--max-new-tokens", "9")
    assert "64 sequences of 256 + 9 tokens" in shown
    words = [*model, "--reward", str(tiny_model), "--reference", "r", "--micro-batch-size", "4"]
    shown = dry_run(capsys, "ppo", *words)
    assert "# Memory of each process for PPO, with prompts of 256 tokens" in shown
    assert "6 × 512 tokens" in shown  # 4 episodes and half as many stored rows
    assert "4 × 512 tokens" in dry_run(capsys, "ppo", *words, "--kl.source", "none")
    words = ["--teacher", str(tiny_model), "--student", str(tiny_model), "--out", model[-1]]
    shown = dry_run(capsys, "distill", *words, "--outputs", "r", "--max-length", "64")
    assert "# Memory of each process for distillation" in shown
    assert "4 sequences of 64 tokens" in shown
    assert not (tmp_path / "out").exists()


def test_a_longer_sequence_needs_more(tiny_model: Path) -> None:
    short = plan.run(Settings(model=str(tiny_model), sequence_length=128))["gib"]
    long = plan.run(Settings(model=str(tiny_model), sequence_length=2048))["gib"]
    stages = ("reward", "reference", "ppo")
    assert all(long[name][stage] > short[name][stage] for name in short for stage in stages)


def test_checkpointing_needs_less_where_something_is_trained(tiny_model: Path) -> None:
    settings = Settings(model=str(tiny_model), gpus=2)
    kept = plan.run(settings)["gib"]["FSDP"]
    again = plan.run(replace(settings, gradient_checkpointing=True))["gib"]["FSDP"]
    assert again["reward"] < kept["reward"]
    assert again["ppo"] < kept["ppo"]
    assert again["reference"] == kept["reference"]
