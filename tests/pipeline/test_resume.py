"""A killed run goes on and ends as if nothing had happened."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.records.jsonl import write_jsonl
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import SHORT, Loop, without_clock
from tests.servers.commands import run_process
from tests.servers.interrupted import kill_in, kill_when, stop_after

STEPS = 10
OPTIONS = ("--save-every", "3", "--minibatches", "2", "--epochs", "2")


@pytest.fixture(scope="module")
def straight(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run that nothing has disturbed."""
    out = tmp_path_factory.mktemp("resume") / "straight"
    whole = run_process(*loop.ppo_arguments(out, *OPTIONS, steps=STEPS))
    assert whole.returncode == 0, whole.stderr
    return out


@pytest.mark.parametrize("phase", ["sampling", "measuring", "updating", "saving"])
def test_a_ppo_run_killed_in_any_phase_ends_bit_for_bit_like_an_undisturbed_one(
    loop: Loop, straight: Path, tmp_path: Path, phase: str
) -> None:
    killed = tmp_path / "killed"
    kill_in(loop.ppo_arguments(killed, *OPTIONS, steps=STEPS), killed, phase, step=4)
    assert RunDir(killed).read_stage()["status"] == "running"
    resumed = run_process(*loop.ppo_arguments(killed, *OPTIONS, "--resume", steps=STEPS))
    assert resumed.returncode == 0, resumed.stderr
    rows = [read_metrics(path / "metrics.jsonl") for path in (straight, killed)]
    for first, second in zip(*rows, strict=True):
        assert without_clock(first) == without_clock(second)
    fits = [RunDir(path).read_report()["critic_fit"] for path in (straight, killed)]
    assert fits[0] == fits[1]
    weights = [load_file(path / "policy" / "model.safetensors") for path in (straight, killed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_killed_reference_run_keeps_its_shards_and_loses_no_row(
    loop: Loop, tmp_path: Path
) -> None:
    def arguments(out: Path) -> list[str]:
        return [
            *("reference", "--prompts", loop.path("prompts.jsonl"), "--model", str(loop.model)),
            *("--out", str(out), "--prompts-per-shard", "2", "--samples", "2", *SHORT, "--resume"),
        ]

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert run_process(*arguments(straight)).returncode == 0
    kill_when(arguments(killed), killed / "outputs" / "train-00001.parquet", lines=0)
    kept = (killed / "outputs" / "train-00000.parquet").stat().st_mtime_ns
    assert not (killed / "outputs" / "manifest.json").exists()
    assert run_process(*arguments(killed)).returncode == 0
    assert (killed / "outputs" / "train-00000.parquet").stat().st_mtime_ns == kept
    rows = [tuple(open_store(path / "outputs").rows) for path in (straight, killed)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 24
    assert not any(row.reused for row in rows[0])


@pytest.mark.parametrize(
    ("stage", "usual", "smaller"),
    [
        ("sft", ("--micro-batch-size", "4"), ("--micro-batch-size", "1")),
        ("reward", ("--tokens-per-batch", "2048"), ("--tokens-per-batch", "64")),
        ("ppo", ("--micro-batch-size", "16"), ("--micro-batch-size", "1")),
        ("ppo", ("--micro-tokens", "1024"), ("--micro-tokens", "64")),
    ],
)
def test_smaller_batches_do_not_change_what_a_resumed_training_ends_with(
    loop: Loop, tmp_path: Path, stage: str, usual: tuple[str, str], smaller: tuple[str, str]
) -> None:
    demonstrations = tmp_path / "demonstrations.jsonl"
    lines = [{"prompt": f"Word {n}?", "completion": "The dog was kind. " * n} for n in range(1, 12)]
    write_jsonl(demonstrations, lines)
    run = RunDir(tmp_path / "run")
    base = ("--model", str(loop.model), "--out", str(run.path), "--precision", "fp32")
    arguments = {
        "sft": ["sft", "--demonstrations", str(demonstrations), *base, "--batch-size", "4"],
        "reward": [
            *("train-reward", "--rankings", loop.path("rankings"), *base),
            *("--prompts-per-batch", "4", "--epochs", "2"),
        ],
        "ppo": loop.ppo_arguments(run.path),
    }[stage]
    arguments += ["--save-every", "1", "--keep-checkpoints", "9"]
    assert main([*arguments, *usual]) == 0
    rows = read_metrics(run.metrics_file)
    assert len(rows) > 3
    stop_after(run, 2)
    assert main([*arguments, *smaller, "--resume"]) == 0
    again = read_metrics(run.metrics_file)
    assert again[:2] == rows[:2]
    for row, expected in zip(again, rows, strict=True):
        row, expected = without_clock(row), without_clock(expected)
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("processes", [2])
def test_two_processes_train_together(loop: Loop, tmp_path: Path, processes: int) -> None:
    out = tmp_path / "two"
    done = run_process(*loop.ppo_arguments(out), processes=processes)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["kl/forward_k3_per_token"] == pytest.approx(0.0, abs=1e-6)
    assert rows[0]["approx_kl"] == pytest.approx(0.0, abs=1e-8)
