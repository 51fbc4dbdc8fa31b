"""What a run reports while it works: metrics.jsonl and a progress bar on stderr."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhf.errors import InputError
from rlhf.ranks import is_main_process
from rlhf.records.documents import REMEDY, require_kinds
from rlhf.records.jsonl import parse_line, write_jsonl
from rlhf.run.telemetry.progress_count import ProgressCount
from rlhf.run.watchdog import beat, count

Metrics = dict[str, Any]


def append_metrics(path: Path, row: Metrics) -> None:
    """Add one step; only the main process writes."""
    if is_main_process():
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[Metrics]:
    """All steps so far, oldest first; empty when there are none.

    An incomplete last line, left by a killed process, is ignored.

    Raises:
        InputError: the file is not text.
        BadLineError: a line is not a JSON object.
    """
    if not path.is_file():
        return []
    whole, _, _ = _as_text(path.read_bytes(), path).rpartition("\n")
    lines = enumerate(whole.split("\n") if whole else [], start=1)
    return [parse_line(line, f"{path}:{number}") for number, line in lines]


def _as_text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})", REMEDY
        ) from None


def forget_metrics_after(path: Path, step: int) -> None:
    """Drop the rows of steps that a resumed run will repeat.

    Raises:
        InputError: the file is not text, or a row has no step.
    """
    if not is_main_process() or not path.is_file():
        return
    rows = read_metrics(path)
    for row in rows:
        require_kinds({"step": None, **row}, {"step": int}, str(path))
    write_jsonl(path, [row for row in rows if row["step"] <= step])


_has_bar: ContextVar[bool] = ContextVar("_has_bar", default=False)


@final
class Bar:
    """A progress bar: `advance` counts work done, `show` sets a few words beside the bar.

    The heartbeat has the count, too; the time left is that of the mean unit since the bar began.
    """

    def __init__(
        self, progress: Progress, task: Any, work: ProgressCount, *, is_counted: bool = True
    ) -> None:
        self._progress = progress
        self._task = task
        self._work = work
        self._first = work.done
        self._began = time.monotonic()
        self._is_counted = is_counted

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""
        work = self._work
        done = min(work.done + amount, work.total)
        each = (time.monotonic() - self._began) / max(1, done - self._first)
        left = (work.total - done) * each if done > self._first else None
        self._work = replace(work, done=done, seconds_left=left, at=time.time())
        if self._is_counted:
            count(self._work)
        beat()
        self._progress.update(self._task, advance=amount)

    def show(self, text: str) -> None:
        """Replace the words beside the bar."""
        self._progress.update(self._task, words=text)


@contextmanager
def progress(title: str, total: int, done: int = 0, *, is_stage: bool = False) -> Iterator[Bar]:
    """A progress bar on stderr of the main process and thread, whose count the heartbeat has, too.

    It is silent in other processes, and not counted inside another bar or in another thread.

    Args:
        title: what is done, in words that end in -ing.
        total: how many there are.
        done: how many of them are done already.
        is_stage: whether the command does little else.
    """
    is_inner = current_thread() is not main_thread() or _has_bar.get()
    work = ProgressCount(
        title=title, done=done, total=total, seconds_left=None, at=time.time(), is_stage=is_stage
    )
    if not is_inner:
        count(work)
    beat(title)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    silent = is_inner or not is_main_process()
    outside = _has_bar.set(True)
    try:
        with Progress(*columns, console=Console(stderr=True), disable=silent) as bars:
            task = bars.add_task(title, total=total, completed=done, words="")
            yield Bar(bars, task, work, is_counted=not is_inner)
    finally:
        _has_bar.reset(outside)
        if not is_inner:
            count(None)
