"""The rank of this process, from the variables that torchrun and accelerate set, and its exit."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ATTEMPT = "RLHF_ATTEMPT"


def rank() -> int:
    """The number of this process in its group; callable before the group exists."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes the group has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True in the one process that prints messages; callable before the group exists."""
    return rank() == 0


def end_with_parent() -> None:
    """Let the system send this process SIGTERM when the one that started it is killed.

    Otherwise the processes of a group would go on without their launcher, and hold the devices and
    the run folder. Only Linux can do it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def without_signals() -> Iterator[None]:
    """Ignore SIGTERM and SIGINT in this block, which must be short: what it records is whole.

    Only the main thread gets signals, and only it can do this; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def command_ending_with_parent(
    command: Sequence[str], by: signal.Signals = signal.SIGTERM
) -> list[str]:
    """The words that start a command for which `end_with_parent` holds, with this signal.

    A small interpreter says so and becomes the command. `preexec_fn` could say it as well, but runs
    Python after the fork, which may crash where other threads are at work.
    """
    if sys.platform != "linux":
        return [*command]
    program = (
        f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {by:d}); "
        f"os.getppid() == {os.getpid()} or sys.exit(1); "  # it was killed before the system knew
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", program, *command]


def is_in_group() -> bool:
    """Whether --processes, torchrun or accelerate has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def exit_process(code: int) -> NoReturn:
    """End this process of a group after running its exit handlers.

    Python's own shutdown is skipped: gloo's threads may free tensors after it, which would abort
    the process.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_restart() -> bool:
    """True where an agent has started this process again after a failure."""
    return any(os.environ.get(n, "0") != "0" for n in (ATTEMPT, "TORCHELASTIC_RESTART_COUNT"))
