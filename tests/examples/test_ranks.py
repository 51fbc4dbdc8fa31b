"""One rank of up to 512, without the others: memory and traffic are the planner's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmarks" / "scale" / "ranks.py"


@pytest.mark.slow
def test_memory_and_traffic_of_a_rank_are_the_planners() -> None:
    command = [sys.executable, "-P", str(SCRIPT), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert [run["ranks"] for run in runs] == [2, 64, 512, 64, 64]  # the last two are PPO
    for run in runs:
        if run["stage"] != "reading":  # planned for large models, where it is within .05
            assert run["bytes ratio"] == pytest.approx(1, abs=0.1)
        assert run["sent ratio"] == pytest.approx(1, abs=0.05)
