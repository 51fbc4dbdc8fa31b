"""`--profile N`: where the time of N steps goes, as traces and as a table of phases.

The phases are those that a loop reports to the watchdog. OUT/profile/ gets phases.json from the
first rank and trace-rank-00000.json.gz from every rank, for chrome://tracing and Perfetto.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from rlhf.records.jsonl import write_json
from rlhf.run.watchdog import listening

FIRST_STEP = 2  # the first one warms caches and allocators


@contextmanager
def profiling(accelerator: Accelerator, steps: int | None, folder: Path) -> Iterator[None]:
    """Profile some steps of the loop inside, starting with its second step; None: no steps.

    The files are written when the steps are done or the block ends.
    """
    if not steps:
        yield
        return
    recorder = _Recorder(accelerator, steps, folder)
    with listening(recorder.on_phase):
        try:
            yield
        finally:
            recorder.end()


@final
class _Recorder:
    """Records the phases of a loop and the time of each."""

    def __init__(self, accelerator: Accelerator, steps: int, folder: Path) -> None:
        self._accelerator = accelerator
        self._steps = steps
        self._folder = folder
        self._seen: list[int] = []
        self._profile: Any = None
        self._range: Any = None
        self._phase = ""
        self._began = 0.0
        self._seconds: dict[str, float] = {}
        self._times: dict[str, int] = {}

    def on_phase(self, phase: str, step: int) -> None:
        """Called when a phase begins."""
        self._close_phase()
        if step and step not in self._seen:
            self._seen.append(step)
            if len(self._seen) == FIRST_STEP:
                self._start()
            elif len(self._seen) == FIRST_STEP + self._steps:
                self.end()
        if self._profile is not None:
            self._phase, self._began = phase, time.monotonic()
            self._range = record_function(f"phase {phase}")
            self._range.__enter__()

    def end(self) -> None:
        """Write the files once; only warns if no step was profiled."""
        self._close_phase()
        if self._profile is None:
            if len(self._seen) < FIRST_STEP:
                message = (
                    f"--profile: fewer than {FIRST_STEP} steps were taken, none was profiled\n"
                )
                sys.stderr.write(message)
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._accelerator.process_index
        self._profile.export_chrome_trace(str(self._folder / f"trace-rank-{number:05d}.json.gz"))
        self._profile = None
        if self._accelerator.is_main_process:
            phases = self._phases()
            write_json(self._folder / "phases.json", phases)
            Console(stderr=True, highlight=False).print(_table(phases))

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._accelerator.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _close_phase(self) -> None:
        if self._range is None:
            return
        if self._accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self._range.__exit__(None, None, None)
        self._range = None
        taken = time.monotonic() - self._began
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + taken
        self._times[self._phase] = self._times.get(self._phase, 0) + 1

    def _phases(self) -> list[dict[str, Any]]:
        total = sum(self._seconds.values())
        return [
            {
                "phase": phase,
                "times": self._times[phase],
                "seconds": round(seconds, 4),
                "share": round(seconds / total, 4) if total else 0.0,
            }
            for phase, seconds in self._seconds.items()
        ]


def _table(phases: list[dict[str, Any]]) -> Table:
    table = Table("phase", "times", "seconds", "share", box=None, pad_edge=False)
    for phase in phases:
        row = (
            phase["phase"],
            str(phase["times"]),
            f"{phase['seconds']:.2f}",
            f"{phase['share']:.0%}",
        )
        table.add_row(*row)
    return table
