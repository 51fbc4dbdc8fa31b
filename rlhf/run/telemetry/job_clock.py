"""Device-seconds of jobs that fill one stage together, of which stage.json cannot keep account.

Each job writes a file of its own, beside its heartbeat. A job that was killed has worked until its
last heartbeat, as a stage has.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.ranks import is_main_process, world_size
from rlhf.records.documents import read_stage_document
from rlhf.records.jsonl import write_json

CLOCK = "clock.json"

_began: dict[Path, float] = {}  # when jobs of this process began, monotonic


@contextmanager
def job_clock(heartbeat: Path) -> Iterator[None]:
    """Add the seconds of the block, in all processes, to those of earlier attempts of a job.

    Args:
        heartbeat: folder of the job's heartbeats.
    """
    if not is_main_process():
        yield
        return
    heartbeat.mkdir(parents=True, exist_ok=True)
    file = heartbeat / CLOCK
    content = {"processes": world_size(), "device_seconds": _seconds_of(file)}
    write_json(file, {**content, "status": "running"})
    _began[file] = time.monotonic()
    try:
        yield
    finally:
        seconds = round(_seconds_of(file), 3)
        del _began[file]
        write_json(file, {**content, "status": "done", "device_seconds": seconds})


def seconds_of_jobs(heartbeat: Path) -> float:
    """The device-seconds of all jobs of a stage until now, from the folder of its heartbeats."""
    return sum(map(_seconds_of, [heartbeat / CLOCK, *heartbeat.glob(f"job-*/{CLOCK}")]))


def _seconds_of(file: Path) -> float:
    if not file.is_file():
        return 0.0
    content = read_stage_document(file)
    if file in _began:
        taken = time.monotonic() - _began[file]
        return float(content["device_seconds"]) + taken * int(content["processes"])
    return seconds_until_last_heartbeat(content, file, file.parent.glob("rank-*.json"))


def seconds_until_last_heartbeat(
    content: Mapping[str, Any], file: Path, heartbeats: Iterable[Path]
) -> float:
    """The device-seconds in a record, and where it says `running` those until the last heartbeat.

    Args:
        content: of the record, with `status`, `processes` and `device_seconds`.
        file: that holds it; nothing writes it between the beginning of an attempt and its end.
        heartbeats: files of all ranks.
    """
    seconds = float(content.get("device_seconds") or 0.0)
    if content.get("status") == "running":
        began = file.stat().st_mtime
        beats = [heartbeat.stat().st_mtime for heartbeat in heartbeats]
        seconds += (max([began, *beats]) - began) * int(content.get("processes", 1))
    return seconds
