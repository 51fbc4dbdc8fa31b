"""Jobs that fill one stage have a clock each."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.planning.price import cost_of
from rlhf.run.rundir import RunDir, device_seconds
from rlhf.run.telemetry import job_clock as module
from rlhf.run.telemetry.job_clock import CLOCK, job_clock, seconds_of_jobs


def write_clock(job: Path, status: str, seconds: float, processes: int) -> Path:
    job.mkdir(parents=True)
    content = {"status": status, "device_seconds": seconds, "processes": processes}
    (job / CLOCK).write_text(json.dumps(content))
    return job / CLOCK


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A job of 30 seconds, and one of 10 whose two processes were killed after 100 more."""
    run = RunDir(tmp_path)
    run.stage_file.write_text('{"stage": "reference", "status": "running", "device_seconds": 0}')
    write_clock(run.heartbeat / "job-0", "done", 30.0, 1)
    clock = write_clock(run.heartbeat / "job-1", "running", 10.0, 2)
    began = clock.stat().st_mtime
    for rank, seconds in enumerate((90, 100)):
        beat = clock.parent / f"rank-0000{rank}.json"
        beat.write_text("{}")
        os.utime(beat, (began, began + seconds))
    return run


def test_the_jobs_of_a_stage_cost_what_they_cost_together(run: RunDir) -> None:
    assert device_seconds(run) == pytest.approx(30 + 10 + 2 * 100)
    assert cost_of(run, 15.0) == {
        "device_hours": pytest.approx(240 / 3600),
        "price_per_hour": 15.0,
        "price": pytest.approx(1.0),
        "annotator_hours": None,
    }


def test_a_job_that_goes_on_adds_to_its_earlier_attempts(run: RunDir) -> None:
    with job_clock(run.heartbeat / "job-1"):
        time.sleep(0.2)
        assert 240.2 <= device_seconds(run) < 245
    content = json.loads((run.heartbeat / "job-1" / CLOCK).read_text())
    assert 210.2 <= content["device_seconds"] < 215
    assert (content["status"], content["processes"]) == ("done", 1)
    assert device_seconds(run) == 30 + content["device_seconds"]


def test_every_process_of_a_job_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setenv("WORLD_SIZE", "4")
    heartbeat = tmp_path / "heartbeat"
    for attempt in (1, 2):
        with job_clock(heartbeat / "job-0"):
            clock.now += 100
            assert seconds_of_jobs(heartbeat) == 400 * attempt
        content = json.loads((heartbeat / "job-0" / CLOCK).read_text())
        assert (content["device_seconds"], content["processes"]) == (400 * attempt, 4)
