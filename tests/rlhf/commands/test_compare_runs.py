"""What `rlhf status` says of several policies of one folder, and what they cost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf import cli
from rlhf.records.jsonl import write_json

HOUR = 3600


def make(folder: Path, stage: str, report: dict[str, Any], *, steps: int = 0, **more: Any) -> None:
    """The folder of a finished stage that took an hour."""
    policy = more.pop("policy", None)
    inputs = {"policy": {"path": str(policy), "hash": "h"}} if policy else {}
    content = {"stage": stage, "status": "done", "inputs": inputs, "device_seconds": HOUR}
    dates = {"started_at": "2026-01-01T10:00:00+00:00", "finished_at": "2026-01-01T11:00:00+00:00"}
    folder.mkdir(parents=True)
    write_json(folder / "stage.json", {**content, **dates, "processes": 1} | more)
    write_json(folder / "report.json", report)
    rows = [json.dumps({"step": step + 1}) + "\n" for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    (folder / "config.yaml").write_text(f"out: {folder}\n")


def judged(value: float, hours: float) -> dict[str, Any]:
    """The report of an evaluation, whose chain took so many hours at 2 each."""
    cost = {"device_hours": hours, "price": 2 * hours, "price_per_point": None}
    rate = {"value": value, "low": None, "high": None}
    return {"verdict": {"judge": "gold"}, "win_rate": {"gold": rate}, "cost": cost}


def trained(speed: float) -> dict[str, Any]:
    return {"use": {"tokens_per_second": speed}, "cost": {"price": 2.0}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A policy and its student, each evaluated, under the names of the guides."""
    folder = tmp_path / "first"
    make(folder / "ppo", "ppo", trained(500.0), steps=7)
    make(folder / "distill", "distill", trained(900.0), steps=3)
    make(folder / "evaluate", "evaluate", judged(0.9, 4.0), policy=folder / "ppo" / "policy")
    student = folder / "distill" / "policy"
    make(folder / "evaluate-distill", "evaluate", judged(0.7, 6.0), policy=student)
    return folder


def compared(capsys: pytest.CaptureFixture[str], *folders: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["status", *map(str, folders), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])["compared"]
    return found


def results(row: dict[str, Any]) -> tuple[Any, ...]:
    rate = row["win_rate"]
    names = ("steps", "tokens_per_second", "device_hours", "price")
    return (rate and rate["value"], *(row[name] for name in names))


def test_every_policy_has_the_win_rate_of_its_own_evaluation(run: Path, capsys) -> None:
    found = compared(capsys, run)
    assert list(found) == [str(run), f"{run}: distill"]
    assert results(found[str(run)]) == (0.9, 7, 500.0, 4.0, 8.0)
    assert results(found[f"{run}: distill"]) == (0.7, 3, 900.0, 6.0, 12.0)
    assert cli.main(["status", str(run)]) == 0  # two policies can be compared
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["run", str(run), f"{run}: distill"]


def test_of_two_evaluations_the_last_to_end_counts(run: Path, capsys) -> None:
    policy, ended = run / "ppo" / "policy", "2025-12-31T11:00:00+00:00"
    make(run / "evaluate-gold", "evaluate", judged(0.6, 4.0), policy=policy, finished_at=ended)
    assert results(compared(capsys, run)[str(run)])[:2] == (0.9, 7)


def test_also_after_the_folder_was_moved_or_copied(run: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run, copied := tmp_path / "copied")
    run.rename(moved := tmp_path / "moved")
    for folder in (copied, moved):
        found = compared(capsys, folder)
        assert results(found[f"{folder}: distill"])[:2] == (0.7, 3)


def test_the_evaluation_of_a_policy_elsewhere_is_not_that_of_the_run(
    run: Path, tmp_path: Path, capsys
) -> None:
    other = tmp_path / "second"
    make(other / "ppo", "ppo", trained(400.0), steps=5)
    make(other / "evaluate", "evaluate", judged(0.9, 4.0), policy=run / "ppo" / "policy")
    assert results(compared(capsys, other)[str(other)])[:2] == (None, 5)
    shutil.rmtree(other / "ppo")  # a folder for evaluations alone
    assert results(compared(capsys, other)[str(other)])[:2] == (0.9, None)


def test_a_quantized_policy_has_a_line_of_its_own(run: Path, capsys) -> None:
    make(run / "int8", "quantize", {"cost": {"price": 2.0}})
    int8 = run / "int8" / "policy"
    make(run / "evaluate-int8", "evaluate", judged(0.8, 5.0), policy=int8)
    found = compared(capsys, run)
    assert results(found[f"{run}: quantize"]) == (0.8, None, None, 5.0, 10.0)
    assert results(found[str(run)])[:2] == (0.9, 7)


def test_of_a_loop_the_newest_evaluated_round_counts(tmp_path: Path, capsys) -> None:
    loop = tmp_path / "loop"
    make(loop, "loop", {"stopped": "x"})
    for number, value in enumerate((0.6, 0.8)):
        folder = loop / f"round-{number}"
        make(folder / "ppo", "ppo", trained(500.0), steps=4 + number)
        policy = folder / "ppo" / "policy"
        make(folder / "evaluate", "evaluate", judged(value, 4.0), policy=policy)
    make(loop / "round-2" / "ppo", "ppo", trained(500.0), steps=9)
    found = compared(capsys, loop)
    assert list(found) == [str(loop)]
    assert results(found[str(loop)])[:2] == (0.8, 5)


def test_before_an_evaluation_only_what_makes_a_policy_has_a_price(tmp_path: Path, capsys) -> None:
    """Two stages of an hour each; not the hour in which a loop waited, nor what comes after."""
    loop = tmp_path / "loop"
    make(loop, "loop", {"stopped": "x"})
    folder = loop / "round-0"
    make(folder / "reward", "reward", {"cost": {"price": 2.0}})
    make(folder / "ppo", "ppo", trained(500.0), steps=4)
    make(folder / "int8", "quantize", {"form": "int8"})  # of a version without costs
    make(folder / "benchmark", "benchmark", {"rows": 3})
    assert results(compared(capsys, loop)[str(loop)]) == (None, 4, 500.0, 2.0, 4.0)


def test_a_stage_that_still_works_costs_what_it_took_so_far(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    make(folder / "reward", "reward", {"cost": {"price": 3.0}})
    make(folder / "ppo", "ppo", {}, steps=4, status="interrupted")
    config = folder / "ppo" / "config.yaml"
    # an hour of ppo without a price, then at 3
    assert results(compared(capsys, folder)[str(folder)])[3:] == (2.0, None)
    config.write_text(config.read_text() + "price_per_hour: 3.0\n")
    assert results(compared(capsys, folder)[str(folder)])[3:] == (2.0, 6.0)
