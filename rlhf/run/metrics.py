"""What a run reports while it works: metrics.jsonl and a progress bar on stderr."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhf.errors import InputError
from rlhf.ranks import is_main_process
from rlhf.records.documents import REMEDY, require_kinds
from rlhf.records.jsonl import parse_line, write_jsonl
from rlhf.run.watchdog import beat

Metrics = dict[str, Any]
BLOCK = 2**16  # bytes


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


def read_last_metrics(path: Path, most: int = 1) -> list[Metrics]:
    """The last steps so far, at most so many, oldest first; reads the end of the file alone.

    An incomplete last line is ignored, as by `read_metrics`.

    Raises:
        InputError: what was read is not text.
        BadLineError: one of these lines is not a JSON object.
    """
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        start = stream.seek(0, os.SEEK_END)
        end = b""
        while start and end.count(b"\n") <= most:
            size = min(start, max(BLOCK, len(end)))
            start = stream.seek(start - size)
            end = stream.read(size) + end
    lines = end.split(b"\n")[:-1][-most:]
    return [
        parse_line(_as_text(line, path), f"{path}, line {number} from the end")
        for number, line in zip(range(len(lines), 0, -1), lines, strict=True)
    ]


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


class Bar:
    """A progress bar: `advance` counts work done, `show` sets a few words beside the bar."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""
        beat()
        self._progress.update(self._task, advance=amount)

    def show(self, words: str) -> None:
        """Replace the words beside the bar."""
        self._progress.update(self._task, words=words)


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """A progress bar on stderr of the main process and thread.

    It is silent in other processes and threads, and inside another bar.
    """
    beat(title)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    is_other = not is_main_process() or current_thread() is not main_thread()
    silent = is_other or _has_bar.get()
    outside = _has_bar.set(True)
    try:
        with Progress(*columns, console=Console(stderr=True), disable=silent) as bars:
            yield Bar(bars, bars.add_task(title, total=total, completed=done, words=""))
    finally:
        _has_bar.reset(outside)
