import gzip
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from rlhf.run.telemetry.profiling import profiling
from rlhf.run.watchdog import beat, watching


def take_steps(folder: Path, steps: int, profiled: int) -> None:
    def ignore(error: Exception) -> None:
        raise AssertionError(error)

    accelerator = Accelerator(cpu=True)
    with (
        watching(folder / "heartbeat", 0, ignore),
        profiling(accelerator, profiled, folder / "profile"),
    ):
        for step in range(1, steps + 1):
            beat("sampling", step)
            torch.ones(3).sin()
            beat("updating", step)
            torch.ones(3).exp() if step in (2, 3) else torch.ones(3).cos()


def test_the_steps_asked_for_are_traced_and_their_phases_added_up(tmp_path: Path, capsys) -> None:
    take_steps(tmp_path, 5, 2)
    found = json.loads((tmp_path / "profile" / "phases.json").read_text(encoding="utf-8"))
    assert [(one["phase"], one["times"]) for one in found] == [("sampling", 2), ("updating", 2)]
    assert sum(one["share"] for one in found) == pytest.approx(1, abs=1e-3)
    shown = capsys.readouterr().err
    assert "share" in shown
    assert "sampling" in shown
    trace = tmp_path / "profile" / "trace-rank-00000.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("phase updating") == 2
    assert names.count("aten::exp") == 2
    assert "aten::cos" not in names  # of steps 1, 4 and 5


def test_a_run_that_ends_early_is_profiled_as_far_as_it_goes(tmp_path: Path) -> None:
    take_steps(tmp_path, 2, 9)
    found = json.loads((tmp_path / "profile" / "phases.json").read_text(encoding="utf-8"))
    assert [(one["phase"], one["times"]) for one in found] == [("sampling", 1), ("updating", 1)]


def test_one_step_only_warms_up(tmp_path: Path, capsys) -> None:
    take_steps(tmp_path, 1, 1)
    assert not (tmp_path / "profile").exists()
    assert "--profile: fewer than 2 steps were taken" in capsys.readouterr().err


def test_nothing_is_profiled_by_default(tmp_path: Path) -> None:
    take_steps(tmp_path, 4, 0)
    assert not (tmp_path / "profile").exists()
