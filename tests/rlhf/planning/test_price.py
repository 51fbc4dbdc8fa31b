"""What stages cost, worked out by hand."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.cli import main
from rlhf.commands.wording import cost_sentence
from rlhf.errors import InterruptedRunError
from rlhf.parallel.settings import ClusterSettings
from rlhf.planning.price import (
    amount,
    cost_of,
    cost_of_chain,
    cost_of_loop,
    cost_of_seconds,
    cost_of_stages,
    price_of_a_point,
)
from rlhf.records.jsonl import write_json
from rlhf.run import rundir
from rlhf.run.rundir import RunDir, device_seconds, open_stage, stage_status, watching_stage
from tests.reward.conftest import build_record, export

STARTED = 1767323045.0  # seconds since 1970


def stage(folder: Path, seconds: float, **inputs: Path) -> RunDir:
    """The folder of a finished stage."""
    described = {name: {"path": str(path), "hash": "h"} for name, path in inputs.items()}
    content = {"stage": folder.name, "status": "done", "inputs": described}
    folder.mkdir(parents=True)
    write_json(folder / "stage.json", {**content, "device_seconds": seconds, "processes": 2})
    return RunDir(folder)


@pytest.fixture
def chain(tmp_path: Path) -> RunDir:
    """An evaluation, of half an hour, and what made its policy: 2.5 + 6 + 1 hours."""
    rankings = tmp_path / "rankings"
    rankings.mkdir()
    manifest = {"format": "ranked", "content_hash": "h", "annotator_hours": 4.5}
    write_json(rankings / "manifest.json", manifest)
    reward = stage(tmp_path / "reward", 2.5 * 3600, rankings=rankings)
    stage(reward.path / "part-1-of-2", 0.5 * 3600)  # in those of its stage
    reference = stage(tmp_path / "reference", 3600, reward=reward.model)
    models = {"reward": reward.model, "reference": reference.path}
    ppo = stage(tmp_path / "ppo", 6 * 3600, model=Path("maker/base"), **models)
    rival = stage(tmp_path / "rival", 100 * 3600)
    judge = stage(tmp_path / "judge", 100 * 3600)
    given = {"policy": ppo.policy, "against": rival.policy, "gold": judge.model, **models}
    return stage(tmp_path / "evaluate", 0.5 * 3600, **given)


def rate(value: float, low: float = 0.51) -> dict[str, Any]:
    return {"value": value, "low": low, "high": 0.99, "p_value": 0.01}


def test_an_evaluation_adds_up_what_made_its_policy(chain: RunDir) -> None:
    # 10 device-hours at 3; people, who count for more than the reward, see 62.5 %: 12.5 points
    found = cost_of_chain(chain, 3.0, {"reward": rate(0.9), "people": rate(0.625)})
    assert found == {
        "device_hours": 10.0,
        "price_per_hour": 3.0,
        "price": 30.0,
        "annotator_hours": 4.5,
        "price_per_point": 2.4,
    }
    assert list(cost_sentence(found)) == [
        "Cost: 10 device-hours at 3 each: 30, and 4.5 annotator-hours; 2.4 for a point of win rate."
    ]


def test_equal_answers_count_one_half_in_the_price_of_a_point() -> None:
    # people see 80 % on 40 prompts; with 40 equal answers that is 65 %: 15 points
    people = {**rate(0.8), "n": 40, "same_answers": 40}
    assert price_of_a_point(30.0, people) == 2.0
    assert price_of_a_point(30.0, {**people, "same_answers": 0}) == 1.0
    assert price_of_a_point(None, people) is price_of_a_point(30.0, None) is None


def test_a_judge_that_did_not_train_the_policy_costs_it_nothing(tmp_path: Path) -> None:
    judge = stage(tmp_path / "judge", 100 * 3600)
    reference = stage(tmp_path / "reference", 10 * 3600, reward=judge.model)
    dpo = stage(tmp_path / "dpo", 2 * 3600, model=Path("maker/base"))
    given = {"policy": dpo.policy, "reference": reference.path, "reward": judge.model}
    evaluation = stage(tmp_path / "evaluate", 3600, **given)
    assert cost_of_chain(evaluation, None, {})["device_hours"] == 3.0


def test_relative_paths_count_from_where_a_stage_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that is read from another folder has the same cost."""
    stage(tmp_path / "runs" / "reward", 3600, rankings=Path("rankings"))
    stage(tmp_path / "runs" / "ppo", 2 * 3600, reward=Path("runs/reward/model"))
    last = stage(tmp_path / "runs" / "evaluate", 3600, policy=Path("runs/ppo/policy"))
    for name in ("reward", "ppo", "evaluate"):
        (tmp_path / "runs" / name / "config.yaml").write_text(f"out: runs/{name}\n")
    (tmp_path / "rankings").mkdir()
    manifest = {"format": "ranked", "content_hash": "h", "annotator_hours": 4.5}
    write_json(tmp_path / "rankings" / "manifest.json", manifest)
    stage(tmp_path / "elsewhere" / "runs" / "reward", 100 * 3600)  # another of the same name
    for folder in (tmp_path, tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        found = cost_of_chain(last, None, {})
        assert (found["device_hours"], found["annotator_hours"]) == (4.0, 4.5)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (2.5, "2.5"), (10, "10"), (0.00041249, "0.000412"), (0.000004, "0.000004"),
     (12.345, "12.3"), (999.96, "1,000"), (1234.5, "1,234"), (2_469_000, "2,469,000")],
)  # fmt: skip
def test_amounts_have_three_digits_and_no_exponent(value: float, words: str) -> None:
    assert amount(value) == words


@pytest.mark.parametrize(
    "judged",
    [
        rate(0.7, low=0.5),
        {**rate(0.7), "p_value": 0.06},
        {**rate(0.7), "low": None},
        rate(0.3, 0.2),
    ],
)
def test_what_is_not_proven_better_has_no_price_for_a_point(
    chain: RunDir, judged: dict[str, Any]
) -> None:
    # the reward is sure of it, but people count for more
    found = cost_of_chain(chain, 3.0, {"reward": rate(0.9), "people": judged})
    assert found["price_per_point"] is None
    assert found["price"] == 30.0


def test_without_a_price_only_hours_are_known(chain: RunDir, tmp_path: Path) -> None:
    found = cost_of(RunDir(tmp_path / "ppo"), None)
    assert found == {
        "device_hours": 6.0, "price_per_hour": None, "price": None, "annotator_hours": None
    }  # fmt: skip
    assert list(cost_sentence(found)) == []
    assert list(cost_sentence(None)) == []
    assert cost_of_stages([chain, RunDir(tmp_path / "reward")], 2.0)["price"] == 6.0


def test_the_newest_export_has_all_hours_of_annotators(chain: RunDir, tmp_path: Path) -> None:
    """An export that was moved since has none that are known."""
    later = tmp_path / "later"
    later.mkdir()
    manifest = {"format": "ranked", "content_hash": "h", "annotator_hours": 7.5}
    write_json(later / "manifest.json", manifest)
    second = stage(tmp_path / "second", 3600, rankings=later)
    third = stage(tmp_path / "third", 3600, rankings=tmp_path / "moved")
    found = cost_of_stages([second, RunDir(tmp_path / "reward"), third], None)
    assert found["annotator_hours"] == 7.5
    assert list(cost_sentence(found)) == ["Cost: 4.5 device-hours, and 7.5 annotator-hours."]


def round_of(loop: Path, number: int, hours: float, before: Path) -> RunDir:
    """A round of a loop: an hour each of reward, reference and ppo, half of evaluate."""
    here, rankings = loop / f"round-{number}", loop / f"round-{number}" / "rankings"
    rankings.mkdir(parents=True)
    manifest = {"format": "ranked", "content_hash": "h", "annotator_hours": hours}
    write_json(rankings / "manifest.json", manifest)
    reward = stage(here / "reward", 3600, rankings=rankings, model=Path("maker/base")).model
    given = {"prompts": rankings, "model": before, "reward": reward}
    reference = stage(here / "reference", 3600, **given).path
    models = {"model": before, "reward": reward, "reference": reference}
    policy = stage(here / "ppo", 3600, **models).policy
    original = loop / "round-0" / "reference"
    return stage(here / "evaluate", 1800, policy=policy, reference=original, reward=reward)


def test_a_chain_of_rounds_has_the_annotators_hours_once(tmp_path: Path) -> None:
    """Every export has the rankings of all rounds: the hours of the last one are those of all."""
    first = round_of(tmp_path, 0, 4.5, Path("maker/base"))
    last = round_of(tmp_path, 1, 6.0, tmp_path / "round-0" / "ppo" / "policy")
    # both rounds but for the evaluation of the first, from which nothing follows
    found = cost_of_chain(last, 2.0, {"people": rate(0.6)})
    assert (found["device_hours"], found["annotator_hours"]) == (6.5, 6.0)
    assert (found["price"], found["price_per_point"]) == (13.0, 1.3)
    found = cost_of_chain(first, 2.0, {})
    assert (found["device_hours"], found["annotator_hours"]) == (3.5, 4.5)
    # the loop has all of it, and half an hour in which responses were sampled and ranked
    times = {"generate": 1000.0, "annotate": 800.0}
    entries = [{"round": 0, "stage": n, "seconds": s, "exit_code": 0} for n, s in times.items()]
    write_json(tmp_path / "commands.json", {"commands": entries})
    found = cost_of_loop(RunDir(tmp_path), 2.0)
    assert (found["device_hours"], found["annotator_hours"]) == (7.5, 6.0)
    assert found["price"] == 15.0


def test_every_process_of_a_stage_counts(tmp_path: Path, monkeypatch) -> None:
    clock = SimpleNamespace(now=5.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(rundir, "time", clock)
    monkeypatch.setenv("WORLD_SIZE", "4")
    run = open_stage(tmp_path / "run", "reward", ClusterSettings(), {}, resume=False)
    clock.now += 100
    assert device_seconds(run) == 400
    with stage_status(run):
        clock.now += 100
    clock.now += 100
    assert device_seconds(run) == run.read_stage()["device_seconds"] == 800


def killed(run: RunDir, seconds: float, heartbeat: Path) -> None:
    """Leave the folder as a kill leaves it, so many seconds after the start of two processes."""
    write_json(run.stage_file, {**run.read_stage(), "status": "running", "processes": 2})
    beat = heartbeat / "rank-00000.json"
    write_json(beat, {})
    for file, when in ((run.stage_file, STARTED), (beat, STARTED + seconds)):
        os.utime(file, (when, when))


def test_who_looks_from_outside_sees_the_hours_of_a_running_stage(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_json(run.stage_file, {"stage": "reward", "device_seconds": 50.0})
    killed(run, 100, run.heartbeat)
    assert device_seconds(run) == 250  # two processes


def test_every_attempt_counts_also_one_that_was_killed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    settings = ClusterSettings()
    open_stage(run.path, "reward", settings, {}, resume=False)
    time.sleep(0.2)
    with pytest.raises(KeyboardInterrupt), stage_status(run):
        raise KeyboardInterrupt
    first = device_seconds(run)
    assert 0.2 <= first < 5
    killed(run, 100, run.heartbeat)
    open_stage(run.path, "reward", settings, {}, resume=True)
    with stage_status(run):
        time.sleep(0.1)
    assert run.read_stage()["device_seconds"] == pytest.approx(first + 200.1, abs=2)


def test_a_stall_keeps_the_seconds_until_then(tmp_path: Path, monkeypatch) -> None:
    run = RunDir(tmp_path / "run")
    open_stage(run.path, "reward", ClusterSettings(), {}, resume=False)
    killed(run, 100, run.heartbeat)
    reported: list[Any] = []

    @contextmanager
    def watch(
        folder: Path, timeout: float, report: Any, *, ranks_synchronize: bool
    ) -> Iterator[None]:
        reported.append(report)
        yield

    monkeypatch.setattr(rundir, "watching", watch)
    with watching_stage(run, 1.0):
        reported[0](InterruptedRunError("No progress", "Look at the stacks."))
    assert run.read_stage()["status"] == "interrupted"
    assert run.read_stage()["device_seconds"] == 200


def test_seconds_have_a_price() -> None:
    # half an hour at 3 an hour
    assert cost_of_seconds(1800, 3.0) == {
        "device_hours": 0.5,
        "price_per_hour": 3.0,
        "price": 1.5,
        "annotator_hours": None,
    }
    assert cost_of_seconds(1800, None)["price"] is None
    # a tenth of a second keeps its digits
    assert cost_of_seconds(0.13689, 7200)["device_hours"] == 0.000038025


def test_parts_count_once_in_their_stage(tmp_path: Path) -> None:
    """Those of a learning curve are trained first; then the stage itself begins anew."""
    run, settings = RunDir(tmp_path / "run"), ClusterSettings()
    open_stage(run.path, "reward", settings, {}, resume=False)
    with stage_status(run, is_complete=lambda: False):
        time.sleep(0.2)
    assert run.read_stage()["status"] == "running"
    assert 0.2 <= run.read_stage()["device_seconds"] < 5
    killed(run, 100, run.path / "part-1-of-8" / "heartbeat")
    open_stage(run.path, "reward", settings, {}, resume=True)
    with stage_status(run):
        pass
    assert run.read_stage()["device_seconds"] == pytest.approx(200, abs=5)
    assert cost_of(run, None)["device_hours"] == pytest.approx(200 / 3600, abs=5 / 3600)


def test_a_training_says_what_it_cost(tiny_model: Path, tmp_path: Path, capsys) -> None:
    rankings = export(tmp_path / "rankings", [build_record(n) for n in range(4)])
    base = ["train-reward", "--rankings", str(rankings), "--model", str(tiny_model)]
    out = tmp_path / "reward"
    assert main([*base, "--out", str(out), "--precision", "fp32", "--price-per-hour", "7200"]) == 0
    cost = RunDir(out).read_report()["cost"]
    half = 0.5e-6  # to which hours are rounded
    assert cost["price"] == pytest.approx(7200 * cost["device_hours"], abs=7200 * half)
    seconds = RunDir(out).read_stage()["device_seconds"]
    assert 0 < cost["device_hours"] * 3600 <= seconds + 3600 * half
    assert "device-hours at 7,200 each" in capsys.readouterr().out


def test_a_price_below_zero_is_refused(refused, tmp_path: Path) -> None:
    for command in (
        ["train-reward", "--rankings", "r", "--model", "m"],
        ["evaluate", "--policy", "p", "--reference", "r", "--reward", "w"],
        ["sft", "--demonstrations", "d", "--model", "m"],
        ["loop", "--model", "m"],
    ):
        said = refused(*command, "--out", tmp_path / "o", "--price-per-hour", "-1")
        assert "--price-per-hour is -1" in said
