"""Which process of a group this is, as torchrun and accelerate tell every process; its end."""

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
    """True in the one process that talks to the user; callable before the group exists."""
    return rank() == 0


def leave(code: int) -> NoReturn:
    """End this process of a group; what was registered to run at exit runs.

    The interpreter is not taken apart: gloo's threads free tensors when a collective is over, and
    would abort the process where that needs an interpreter that is gone.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_restart() -> bool:
    """True where an agent has started this process again after a failure."""
    return any(os.environ.get(n, "0") != "0" for n in (ATTEMPT, "TORCHELASTIC_RESTART_COUNT"))
