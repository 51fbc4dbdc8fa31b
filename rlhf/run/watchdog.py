"""Detects stalls by a heartbeat of each rank: reports the slow ranks and exits with code 75.

Every rank counts its progress in heartbeat/rank-00000.json. If a rank makes none for the timeout, a
thread writes its stacks to heartbeat/rank-00000.stack, and whether it only waits for other ranks; a
rank that waits for others which still make progress is not stalled. A few seconds later all ranks
that still run have done the same: those that do not wait are the slow ones. PyTorch's own timeouts
name a collective operation; this names a rank and a phase.

On CUDA a collective operation returns before it is done, and a rank waits for others wherever it
next reads a result. There any rank may wait that does not move while others do, and of those not
seen in a collective operation the ones with the fewest heartbeats are the slow ones.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import get_type_hints

from rlhf.errors import InterruptedRunError
from rlhf.ranks import rank, world_size
from rlhf.records.documents import Kinds, read_document
from rlhf.records.jsonl import write_json
from rlhf.run.telemetry.progress_count import ProgressCount

GRACE_SECONDS = 2.0
FOLDER_VARIABLE = "RLHF_HEARTBEAT"  # `rlhf loop` sets it for a command without a run folder
SECONDS_BETWEEN_COUNTS = 3.0  # a file system that many ranks share is not kept busy
LATE_SHARE = 0.7  # of the timeout: heartbeats of other ranks are up to a fifth of it old
COLLECTIVES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "accelerate/utils/operations.py",
)
OPERATORS = "torch/_ops.py"  # calls every operator of torch.ops, collective or not
COLLECTIVE_OPERATORS = ("c10d", "symm_mem")  # are in the names of their namespaces
BACKWARD = ("torch/autograd/graph.py",)  # calls C++, in which DDP waits for others


@dataclass
class Heartbeat:
    """The last report of a rank: its number of beats, phase, step and work, and whether it waits.

    A rank in a backward pass computes, or waits for the backward passes of others. On CUDA
    neither can be read from its stack.
    """

    rank: int
    host: str
    pid: int
    beats: int = 0
    phase: str = "starting"
    step: int = 0
    waits: bool | None = None
    in_backward: bool = False
    on_cuda: bool = False
    work: ProgressCount | None = None

    @property
    def doing(self) -> str:
        """In words what this rank does: its work with the count, if it counts, and the phase."""
        if self.work is None:
            return self.phase
        text = f"{self.work.title}, {self.work.done:,} of {self.work.total:,}"
        return text if self.phase == self.work.title else f"{text}, {self.phase}"


HEARTBEAT_KINDS: Kinds = {**get_type_hints(Heartbeat), "work": dict | None}


class _Watch:
    """The heartbeat of this process; it is written to files only inside `watching`."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat(rank(), socket.gethostname(), os.getpid())
        self.folder: Path | None = None
        self.ranks_synchronize = True
        self.beaten_at = self.counted_at = time.monotonic()
        self.listeners: list[Callable[[str, int], None]] = []


_watch, _writing = _Watch(), threading.RLock()


def beat(phase: str | None = None, step: int | None = None) -> None:
    """Report that this rank makes progress, and in which phase and step; None: unchanged.

    It is cheap: call it wherever work is done.
    """
    heartbeat = _watch.heartbeat
    moved = (phase or heartbeat.phase, heartbeat.step if step is None else step)
    changed = moved != (heartbeat.phase, heartbeat.step)
    heartbeat.beats += 1
    heartbeat.phase, heartbeat.step = moved
    _watch.beaten_at = time.monotonic()
    if not changed:
        return
    for listener in _watch.listeners:
        listener(heartbeat.phase, heartbeat.step)
    if _watch.folder is not None:
        _write(_watch.folder, heartbeat)


def count(work: ProgressCount | None) -> None:
    """Report what this rank counts; None: nothing any more.

    It is written when it begins and ends and with each new phase, otherwise at most once every
    `SECONDS_BETWEEN_COUNTS`.
    """
    begins = _watch.heartbeat.work is None
    _watch.heartbeat.work = work
    if _watch.folder is None:
        return
    now = time.monotonic()
    if work is None or begins or now - _watch.counted_at >= SECONDS_BETWEEN_COUNTS:
        _watch.counted_at = now
        _write(_watch.folder, _watch.heartbeat)


@contextmanager
def listening(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Call a listener for every phase and step that begins while the block runs."""
    _watch.listeners.append(listener)
    try:
        yield
    finally:
        _watch.listeners.remove(listener)


@contextmanager
def watching(
    folder: Path,
    timeout_seconds: float | None,
    on_stall: Callable[[InterruptedRunError], None],
    *,
    ranks_synchronize: bool = True,
) -> Iterator[None]:
    """Watch this rank while the block runs; without a timeout, only write heartbeats.

    The folder is shared by all ranks. One rank calls `on_stall` before the process exits with 75.
    `ranks_synchronize`: ranks wait for each other, so one that stands still while others go on may
    only be waiting on its device.
    """
    _watch.ranks_synchronize = ranks_synchronize
    folder.mkdir(parents=True, exist_ok=True)
    _watch.folder = folder
    _watch.counted_at = time.monotonic()
    _watch.heartbeat = Heartbeat(rank(), socket.gethostname(), os.getpid())
    beat("starting", 0)
    _write(folder, _watch.heartbeat)  # replaces an earlier attempt's
    ended = threading.Event()
    arguments = (folder, timeout_seconds, on_stall, ended)
    thread = threading.Thread(target=_watch_for_stalls, args=arguments, daemon=True)
    if timeout_seconds:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        _watch.folder = None


@contextmanager
def reporting_to_loop() -> Iterator[None]:
    """Write heartbeats while the block runs, if a loop has started this command and asks for them.

    Processes that the command starts do not write there.
    """
    folder = os.environ.pop(FOLDER_VARIABLE, None)
    if folder is None:
        yield
        return
    with watching(Path(folder), None, lambda stall: None):
        yield


def _watch_for_stalls(
    folder: Path,
    timeout_seconds: float,
    on_stall: Callable[[InterruptedRunError], None],
    ended: threading.Event,
) -> None:
    detector = _StallDetector(folder, timeout_seconds)
    while not ended.wait(min(1.0, timeout_seconds / 10)):
        try:
            stalled = detector.is_stalled()
        except OSError:  # the folder is gone or full: look at this rank alone
            stalled = detector.silence() > timeout_seconds
        if stalled:
            break
    else:
        return
    has_ended = False
    try:
        dump_stacks(folder, _watch.heartbeat)
        has_ended = ended.wait(GRACE_SECONDS)
        if has_ended:
            return
        # an earlier attempt may have had more ranks
        heartbeats = [
            heartbeat for heartbeat in read_heartbeats(folder) if heartbeat.rank < world_size()
        ]
        own = _watch.heartbeat
        # where ranks work on their own, the others may go on and not know of this one
        is_alone = not (_watch.ranks_synchronize or own.waits)
        slow = [own.rank] if is_alone else find_slow(heartbeats, world_size())
        if is_alone or own.rank == reporting_rank(slow, world_size()):
            on_stall(describe_stall(heartbeats, slow, timeout_seconds, folder))
        else:
            time.sleep(GRACE_SECONDS)  # the agent stops all processes when the first one ends
    finally:  # also when the disk is full, or this rank would hang for good
        if not has_ended:
            os._exit(InterruptedRunError.exit_code)


class _StallDetector:
    """Decides in each rank whether it has stalled, from its own and the others' heartbeats."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self.folder = folder
        self.timeout = timeout_seconds
        self.checked_at = time.monotonic()
        self.beats: int | None = None  # of the other ranks, at the last check
        self.waited_at = 0.0  # when it last waited for others that made progress

    def silence(self) -> float:
        """Seconds since this rank last made progress or waited for others that did."""
        return time.monotonic() - max(_watch.beaten_at, self.waited_at)

    def is_stalled(self) -> bool:
        """Whether this rank made no progress for the timeout, or nearly and another has stalled."""
        if time.monotonic() - self.checked_at >= self.timeout / 10:
            self._exchange()
        silence = self.silence()
        nearly = LATE_SHARE * self.timeout < silence
        return silence > self.timeout or (
            nearly
            and any(
                heartbeat.waits is not None and not process_has_ended(heartbeat)
                for heartbeat in self._others()
            )
        )

    def _exchange(self) -> None:
        _write(self.folder, _watch.heartbeat)
        beats = sum(heartbeat.beats for heartbeat in self._others())
        if self.beats not in (None, beats) and (
            _waits_for_others() or (_watch.ranks_synchronize and _is_on_cuda())
        ):
            self.waited_at = time.monotonic()
        self.beats, self.checked_at = beats, time.monotonic()

    def _others(self) -> list[Heartbeat]:
        own = _watch.heartbeat.rank
        return [h for h in read_heartbeats(self.folder) if h.rank < world_size() and h.rank != own]


def dump_stacks(folder: Path, heartbeat: Heartbeat) -> None:
    """Write this rank's stacks, and whether its main thread waits for others."""
    heartbeat.waits, heartbeat.in_backward = _waits_for_others(), _is_in(BACKWARD)
    heartbeat.on_cuda = _is_on_cuda()
    with _file(folder, heartbeat.rank).with_suffix(".stack").open("w", encoding="utf-8") as stream:
        faulthandler.dump_traceback(stream, all_threads=True)
    _write(folder, heartbeat)


def _waits_for_others() -> bool:
    """Whether the main thread is in a collective operation."""
    frame = _main_frame()
    if frame is None or OPERATORS not in frame.f_code.co_filename:
        return _is_in(COLLECTIVES)
    operator = str(frame.f_locals.get("self"))  # such as _c10d_functional.wait_tensor
    return any(part in operator.partition(".")[0] for part in COLLECTIVE_OPERATORS)


def _is_in(files: tuple[str, ...]) -> bool:
    """Whether the main thread runs code of one of these files."""
    frame = _main_frame()
    return frame is not None and any(part in frame.f_code.co_filename for part in files)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_on_cuda() -> bool:
    """Whether this process has used a CUDA device; a process that never imported torch has not."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """The last heartbeats of all ranks, by rank.

    Raises:
        InputError: a file is broken.
    """
    return [_read_heartbeat(file) for file in sorted(folder.glob("rank-*.json"))]


def _read_heartbeat(file: Path) -> Heartbeat:
    content = read_document(file, HEARTBEAT_KINDS)
    required = {name: content[name] for name in ("rank", "host", "pid")}
    values = {name: content[name] for name in HEARTBEAT_KINDS if name in content}
    if values.get("work") is not None:
        values["work"] = ProgressCount.of(values["work"], f"{file} (work)")
    return Heartbeat(**required | values)


def running_heartbeat(folder: Path) -> Heartbeat | None:
    """The last report of the first rank whose process has not ended; None if all have.

    Raises:
        InputError: a file is broken.
    """
    return next(
        (heartbeat for heartbeat in read_heartbeats(folder) if not process_has_ended(heartbeat)),
        None,
    )


def process_has_ended(heartbeat: Heartbeat) -> bool:
    """Whether the process of a rank has ended; False on other machines, where it is unknown."""
    if heartbeat.host != socket.gethostname():
        return False
    try:
        os.kill(heartbeat.pid, 0)  # sends nothing, only checks that it exists
    except (ProcessLookupError, OverflowError):  # larger than any process id
        return True
    except PermissionError:  # another user's process
        pass
    return False


def find_slow(heartbeats: list[Heartbeat], ranks: int) -> list[int]:
    """Ranks that others wait for: silent ones, else busy ones, else those with the fewest beats.

    A backward pass may wait for other ranks, so it counts as busy only if some rank is in none.
    Busy ranks are only slow if some others are not busy. On CUDA, where a waiting rank may look
    busy, beats decide among all that are in no collective operation.
    """
    known = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
    silent = [
        number for number in range(ranks) if number not in known or known[number].waits is None
    ]
    busy = [
        heartbeat.rank for heartbeat in heartbeats if not (heartbeat.waits or heartbeat.in_backward)
    ]
    backward = [heartbeat.rank for heartbeat in heartbeats if heartbeat.in_backward]
    on_cuda = any(heartbeat.on_cuda for heartbeat in heartbeats)
    maybe_slow = [
        heartbeat for heartbeat in heartbeats if on_cuda and not heartbeat.waits
    ] or heartbeats
    fewest = min((heartbeat.beats for heartbeat in maybe_slow), default=0)
    last = [heartbeat.rank for heartbeat in maybe_slow if heartbeat.beats == fewest]
    if on_cuda:
        return silent or last
    return silent or next((some for some in (busy, backward) if 0 < len(some) < ranks), last)


def reporting_rank(slow: list[int], ranks: int) -> int:
    """The rank that reports to the user: the first that is not slow, else the first slow one."""
    return next((number for number in range(ranks) if number not in slow), slow[0] if slow else 0)


def describe_stall(
    heartbeats: list[Heartbeat], slow: list[int], timeout_seconds: float, folder: Path
) -> InterruptedRunError:
    """The message about a stall: which ranks, and in which phase and step."""
    known = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
    named = "; ".join(
        f"rank {number} ({known[number].host}, process {known[number].pid}) is stuck in "
        f"{known[number].phase!r} of step {known[number].step}"
        if number in known
        else f"rank {number} never started"
        for number in slow
    )
    return InterruptedRunError(
        f"No progress for {timeout_seconds:g} seconds: {named}",
        f"The stacks of all ranks are in {folder}. Run the same command with --resume to go on, "
        "or with --parallel.max-restarts N to do so by itself; --parallel.stall-timeout sets the "
        "time limit.",
    )


def _write(folder: Path, heartbeat: Heartbeat) -> None:
    with _writing:  # two threads do: the newest state has the last word
        write_json(_file(folder, heartbeat.rank), asdict(heartbeat))


def _file(folder: Path, of_rank: int) -> Path:
    return folder / f"rank-{of_rank:05d}.json"
