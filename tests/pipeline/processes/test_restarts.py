"""Processes that die or are stopped: the run goes on and ends as if nothing had happened."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhf.run.rundir import RunDir
from tests.pipeline.loop import Loop
from tests.policies.training import metrics_of
from tests.servers.commands import Command, run_process, start_process

STARTS = 1800.0  # seconds for a group to come up on a machine that does other things first


def read_heart(run: Path, rank: int) -> dict[str, Any]:
    file = RunDir(run).heartbeat / f"rank-{rank:05d}.json"
    if not file.is_file():
        return {"pid": 0, "step": 0, "phase": ""}
    heart: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return heart


def same_weights(*runs: Path) -> bool:
    first, second = (load_file(run / "policy" / "model.safetensors") for run in runs)
    return all(first[name].equal(second[name]) for name in first)


def kill_ranks(process: Command, run: Path, kills: int, seed: int) -> int:
    """SIGKILL random ranks at random moments, each in a fresh group; how many were killed.

    Some moments are steps later than the last, or a busy machine would die at its first step only.
    """
    dice, dead = random.Random(seed), {0}
    done = reached = 0
    while done < kills:
        rank, wait = dice.randrange(2), dice.uniform(0.0, 0.4)
        reached += dice.randrange(3)
        limit = time.monotonic() + STARTS
        while (
            (heart := read_heart(run, rank))["pid"] in dead
            or heart["phase"] == "starting"
            or heart["step"] < reached
        ):
            if process.poll() is not None or time.monotonic() > limit:
                return done
            time.sleep(0.005)
        time.sleep(wait)
        pids = [read_heart(run, one)["pid"] for one in range(2)]
        try:
            os.kill(heart["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return done  # it had ended
        dead.update(pids)
        done += 1
    return done


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "steps"), [(2, 8), pytest.param(20, 60)])
def test_killed_ranks_are_started_again_and_the_end_is_the_same(
    loop: Loop, tmp_path: Path, kills: int, steps: int
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options = ("--processes", "2", "--save-every", "1", "--keep-checkpoints", "2")
    options += ("--kl.target", "0.01", "--kl.horizon", "40")
    whole = run_process(*loop.ppo_arguments(straight, *options, steps=steps))
    assert whole.returncode == 0, whole.stderr
    restarts = ("--max-restarts", str(kills))
    process = start_process(*loop.ppo_arguments(killed, *options, *restarts, steps=steps))
    done = kill_ranks(process, killed, kills, seed=kills)
    _, shown = process.communicate()
    assert process.returncode == 0, shown[-4000:]
    assert done == kills
    assert f"restart {kills} of {kills} from the last checkpoint" in shown
    assert same_weights(straight, killed)
    rows = metrics_of(killed)
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert rows == metrics_of(straight)
    assert len({row["kl/coefficient"] for row in rows}) > 1


def test_a_run_that_is_told_to_stop_saves_and_goes_on(loop: Loop, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    options = ("--save-every", "1000")
    whole = run_process(*loop.ppo_arguments(straight, *options, steps=30))
    assert whole.returncode == 0, whole.stderr
    process = start_process(*loop.ppo_arguments(stopped, *options, steps=30))
    limit = time.monotonic() + STARTS
    while read_heart(stopped, 0)["step"] < 2 and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, shown = process.communicate()
    assert process.returncode == 75, shown
    assert "Stopped on request after step " in shown
    assert "Run the same command with --resume to go on." in shown
    assert RunDir(stopped).read_stage()["status"] == "interrupted"
    (kept,) = (stopped / "checkpoints").glob("step-*")
    assert 2 <= int(kept.name[5:]) < 30
    resumed = run_process(*loop.ppo_arguments(stopped, *options, "--resume", steps=30))
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(straight, stopped)


def test_checkpoints_may_be_minutes_apart(loop: Loop, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--save-every", "1000", "--save-minutes", "0.000001", "--keep-checkpoints", "9")
    done = run_process(*loop.ppo_arguments(out, *options, steps=3))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == [
        "step-000001",
        "step-000002",
        "step-000003",
    ]
