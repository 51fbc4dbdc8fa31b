"""Saves a training loop's state when it is due, at once or in the background."""

import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from accelerate import Accelerator
from torch.distributed import ProcessGroup, new_group

from rlhf.errors import InterruptedRunError
from rlhf.parallel.distributed import extend_timeouts
from rlhf.parallel.settings import CheckpointSettings
from rlhf.run.checkpoint import (
    WITHOUT_GROUP,
    Snapshot,
    checkpoint_folder,
    save_checkpoint,
    write_snapshot,
)
from rlhf.run.watchdog import beat


@final
class _BackgroundWriter:
    """Writes one checkpoint at a time in a thread, from a copy of the state in main memory."""

    def __init__(self, accelerator: Accelerator, folder: Path, keep: int) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._keep = keep
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._group: ProcessGroup | None = None
        warnings.filterwarnings("ignore", WITHOUT_GROUP, UserWarning)
        if accelerator.num_processes > 1:  # the training uses the other groups meanwhile
            self._group = new_group(backend="gloo")
            extend_timeouts()

    def start(self, step: int, progress: dict[str, Any]) -> Path:
        """Copy the state, and begin to write it as soon as the last one is written."""
        self.wait()
        beat("saving", step)
        snapshot = Snapshot.of(self._accelerator, step, progress).copied()
        arguments = (self._accelerator, self._folder, self._keep, snapshot, self._group)
        self._pending = self._pool.submit(write_snapshot, *arguments)
        return checkpoint_folder(self._folder, step)

    def wait(self) -> None:
        """Wait until what was begun is written.

        Raises:
            Exception: as `save_checkpoint`, if that failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise what `wait` would, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def settle(self) -> None:
        """Wait as `wait` does, for a training that has failed already: nothing is raised."""
        wait([self._pending] if self._pending else [])


@final
class Saver:
    """Saves a loop's state every few steps or minutes, and on SIGTERM.

    Args:
        accelerator: with the prepared model and optimizer.
        folder: the run's checkpoints folder.
        settings: how often to save, and how many checkpoints to keep.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, settings: CheckpointSettings
    ) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._every_steps = settings.every
        self._every_seconds = 60 * (settings.every_minutes or 0)
        self._keep = settings.keep
        self._saved_at = time.monotonic()
        self._asked_to_stop = False
        self._is_due = False
        self._background = (
            _BackgroundWriter(accelerator, folder, settings.keep) if settings.asynchronous else None
        )

    @contextmanager
    def saving_on_sigterm(self) -> Iterator[None]:
        """SIGTERM takes effect after the current step; a second SIGTERM at once.

        When the block ends, what is still being written is waited for.
        """
        before = signal.getsignal(signal.SIGTERM)

        def remember(number: int, frame: FrameType | None) -> None:
            self._asked_to_stop = True
            signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, remember)
        try:
            yield
            if self._background:
                self._background.wait()
        finally:
            if self._background:
                self._background.settle()
            signal.signal(signal.SIGTERM, before)

    def after_step(
        self, step: int, progress: dict[str, Any], *, is_good: bool = True, is_last: bool = False
    ) -> None:
        """Save if a checkpoint is due; all ranks call this after every step.

        If the step is not good, saving waits for the next good one, unless the process must stop.
        The last step is also saved if the training is longer than `every_steps`, since the work
        that follows may fail.

        Raises:
            InterruptedRunError: a process was asked to stop; the state is saved.
        """
        if self._background:
            self._background.check()
        late = self._every_seconds and time.monotonic() - self._saved_at >= self._every_seconds
        requests = torch.tensor(
            [self._asked_to_stop, bool(late and self._accelerator.is_main_process)],
            dtype=torch.int32,
            device=self._accelerator.device,
        )
        stop, late = self._accelerator.reduce(requests, reduction="sum").tolist()
        every = self._every_steps
        on_time = every is not None and (every < step if is_last else step % every == 0)
        self._is_due = bool(self._is_due or late or on_time)
        if stop or (self._is_due and is_good):
            path = self._save(step, progress, must_wait=bool(stop))
            self._saved_at, self._is_due = time.monotonic(), False
            if stop:
                raise InterruptedRunError(
                    f"Stopped on request after step {step}; the state is in {path}",
                    "Run the same command with --resume to go on.",
                )

    def _save(self, step: int, progress: dict[str, Any], *, must_wait: bool) -> Path:
        if not self._background:
            return save_checkpoint(self._accelerator, self._folder, step, progress, self._keep)
        path = self._background.start(step, progress)
        if must_wait:
            self._background.wait()
        return path
