"""The rank of this process, from the variables that torchrun and accelerate set, and its exit."""

import atexit
import os
import sys
from typing import NoReturn

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
