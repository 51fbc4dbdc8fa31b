"""Everything around a training loop: checks, run folder, status, watchdog, tracker, profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from rlhf.run.preflight import check_before_training, require_shared
from rlhf.run.rundir import RunDir, StageInputs, open_stage, stage_status, watching_stage
from rlhf.run.telemetry.profiling import profiling
from rlhf.run.telemetry.tracking import tracking


@contextmanager
def training_stage(
    accelerator: Accelerator,
    stage: str,
    settings: Any,
    inputs: StageInputs,
    disk_bytes: int,
    *,
    is_member: bool = False,
) -> Iterator[RunDir]:
    """Open the run folder for a training and record how the block ends.

    Every process calls this. A finished run is only opened, nothing is recorded: check
    `run.is_done` first and return the report.

        with training_stage(accelerator, "reward", settings, inputs, disk_bytes) as run:
            if run.is_done:
                return run.read_report()
            ...  # train, write the report

    Args:
        accelerator: of the run.
        stage: reward or ppo.
        settings: a `ClusterSettings` with `out` and `resume`.
        inputs: for every input its `path` and `hash`.
        disk_bytes: bytes on disk for the checkpoints and the result.
        is_member: one model of an ensemble, which itself reports to `--notify` how it ended; stalls
            are still reported from here, because they end the process.

    Raises:
        InputError: the folder cannot be used, the disk is too small, or a device fails.
        MismatchError: a process has other packages or inputs than the first.
        ConfigError: the tracker's package is not installed.
    """
    check_before_training(accelerator, settings, settings.out, inputs, disk_bytes)
    run = open_stage(settings.out, stage, settings, inputs, resume=settings.resume)
    accelerator.wait_for_everyone()
    require_shared(run)
    if run.is_done:
        yield run
        return
    with (
        stage_status(run, None if is_member else settings.notify),
        watching_stage(run, settings.parallel.stall_timeout, settings.notify),
        tracking(accelerator, settings.track, run.path, settings),
        profiling(accelerator, settings.profile, run.profile),
    ):
        yield run
