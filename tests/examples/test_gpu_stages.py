"""The stages for a rented GPU, rehearsed with a tiny model; how they go on after a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.gpu import carry, results, run
from tests.servers.commands import REPOSITORY

STAGES = (
    ("run_tests",),
    ("flex_lengths",),
    ("reward_model", "--size", "1b"),
    ("reward_model", "--size", "6b"),
    ("ppo_steps", "--size", "1b"),
    ("ppo_steps", "--size", "6b"),
)
IN_ONE_PROCESS = """
import sys
from importlib import import_module
sys.modules.update(dict.fromkeys({blocked}))
for stage, *words in {stages}:
    flags = [*words, "--rehearse", "--out", {out}]
    import_module(f"examples.benchmarks.gpu.{{stage}}").main(flags)
"""
NOT_THERE = (
    *("trl", "datasets", "gradio", "deepspeed", "sqlite_utils", "nh3", "sacrebleu", "gguf"),
    "scipy",
)


def rehearse(stages: Any, out: Path, blocked: tuple[str, ...]) -> str:
    """Run stages in one process, in which some packages cannot be imported; what it prints."""
    code = IN_ONE_PROCESS.format(stages=stages, out=repr(str(out)), blocked=blocked)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def arguments_of(out: Path) -> Any:
    return results.parse(results.parser_of("Test."), ["--rehearse", "--out", str(out)])


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    results.device.cache_clear()
    yield
    results.device.cache_clear()


@pytest.mark.slow
def test_every_stage_runs_with_a_tiny_model(tmp_path: Path) -> None:
    printed = rehearse((*STAGES, *STAGES[1:3]), tmp_path, NOT_THERE)
    lines = results.read_results(tmp_path / "results.jsonl")
    assert [line["stage"] for line in lines] == [stage for stage, *_ in STAGES]
    assert all(line["rehearsal"] and line["device"] == "cpu" for line in lines)
    tests, flex, *reward, ppo, adapters = (line["result"] for line in lines)
    assert (tests["failed"], tests["failures"]) == (0, [])
    assert tests["skipped"] >= 4
    assert len({one["tokens"] for one in flex["lengths"]}) == 3
    assert flex["falls_back"] == []
    assert [(one["adapter"], one["checkpointing"]) for one in reward] == [
        ("none", False),
        ("lora", True),
    ]
    for one in reward:
        assert one["loss"] == pytest.approx(0.693, abs=0.02)  # a fresh head tells nothing apart
        assert one["rankings_per_second"] > 0
    for one in (ppo, adapters):
        assert 0 < one["sampler_gap"] < 0.1
        assert 1 < one["length"] < 24  # ended by the end token, not at the limit
        assert one["eos_rate"] > 0.5
    assert printed.count("begins (rehearsal)") == len(STAGES)
    assert printed.count("measured already") == 2


@pytest.mark.usefixtures("_no_gpu")
def test_a_failed_case_leaves_its_error_and_is_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments_of(tmp_path)

    def fail() -> dict[str, Any]:
        raise MemoryError("too large")

    with pytest.raises(MemoryError):
        results.measure(arguments, "stage", {"size": "6b"}, fail)
    with arguments.results.open("a") as file:
        file.write('{"stage": "torn", "settings": {"size": "6b"}')
    assert results.has_failed(arguments, "stage", {"size": "6b"})
    assert results.find_result(arguments, "stage", {"size": "6b"}) is None
    for value in (1, 2):  # the second call finds what the first has measured
        found = results.measure(arguments, "stage", {"size": "6b"}, lambda n=value: {"value": n})
        assert found == {"value": 1}
    first, second = results.read_results(arguments.results)
    assert first["error"] == "MemoryError('too large')"
    assert second["result"] == {"value": 1}
    assert f"stage 6b: measured already, in {arguments.results}" in capsys.readouterr().out
    assert results.find_result(arguments, "stage", {"size": "1b"}) is None


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu_only_a_rehearsal_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main([])
    assert caught.value.code == 2
    assert "add --rehearse to try this with a tiny model" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_gpu")
def test_when_the_time_is_up_nothing_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--rehearse", "--minutes", "0", "--out", str(tmp_path)]) == 75
    words = "run_tests: the time is up; run the same command again to go on\n"
    assert capsys.readouterr().out == words


@pytest.mark.usefixtures("_no_gpu")
def test_a_stage_that_takes_too_long_is_stopped_and_comes_last(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        run.run_stage(arguments, "run_tests", {}, 0.1)
    error = {"error": "stopped after 540 s"}
    results.append(arguments.results, results.key_of(arguments, "run_tests", {}) | error)
    order = sorted(run.STAGES, key=lambda one: results.has_failed(arguments, *one))
    assert order[0] == ("flex_lengths", {})
    assert order[-1] == ("run_tests", {})


def test_what_is_carried_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert carry.main([]) == 0
    assert capsys.readouterr().out == "nothing is missing\n"  # of what `make install` brings
    assert sum(wheel.megabytes for wheel in carry.WHEELS if wheel.megabytes < 10) < 8
    assert max(wheel.megabytes for wheel in carry.WHEELS) < 64


@pytest.mark.slow
def test_all_stages_one_after_the_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.benchmarks.gpu.run", "--rehearse", "--minutes", "30"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=REPOSITORY, env=environment, check=False
    )
    assert done.returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    measured = [(line["stage"], line["settings"]) for line in lines if "result" in line]
    assert measured == [one for one in run.STAGES if "vllm" not in one[1].values()]
    assert "over_trl" in lines[3]["result"]


@pytest.mark.slow
def test_reward_stages_do_without_pyarrow(tmp_path: Path) -> None:
    rehearse(STAGES[:3], tmp_path, (*NOT_THERE, "pyarrow", "matplotlib"))


def test_training_a_reward_model_imports_no_scipy() -> None:
    code = "import sys; sys.modules['scipy'] = None; import reward.training.step"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
