"""Dry runs of ranks of FSDP and phases of DDP: memory and traffic are the planner's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCALE = Path(__file__).parents[2] / "examples" / "benchmarks" / "scale"


def dry_runs(script: str) -> list[dict[str, Any]]:
    """What a script measured, and what is planned."""
    command = [sys.executable, "-P", str(SCALE / script), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["runs"]
    return found


@pytest.mark.slow
def test_memory_and_traffic_of_a_rank_are_the_planners() -> None:
    runs = dry_runs("ranks.py")
    assert [(run["ranks"], run["stage"]) for run in runs] == [
        *((2, "reward"), (64, "reward"), (512, "reward"), (64, "ppo"), (64, "reading")),
        *((64, "reward"), (64, "ppo")),  # bf16 weights, as those of 6B
        *((8, "reward"), (8, "ppo"), (8, "reading")),
    ]
    assert [run["bf16_weights"] for run in runs] == [False] * 5 + [True] * 5
    for run in runs:
        assert run["bytes ratio"] == pytest.approx(1, abs=0.1)
        assert run["sent ratio"] == pytest.approx(1, abs=0.05)
    sizes = [(one["measured"]["bytes"], one["planned"]["bytes"]) for one in runs[-3:]]
    for measured, planned in sizes:
        assert measured == pytest.approx(planned, rel=0.06)


@pytest.mark.slow
def test_phases_of_a_process_of_ddp_are_the_planners() -> None:
    runs = dry_runs("phases.py")
    assert [(run["checkpointing"], run["bf16_weights"]) for run in runs] == [
        *((False, False), (False, True), (True, False))
    ]
    for run in runs:
        assert set(run["phases"]) == {
            *("reading the rollout", "measuring the KL", "auditing", "computing gradients"),
            "stepping",
        }
        for phase in run["phases"].values():
            assert phase["ratio"] == pytest.approx(1, abs=0.1)
