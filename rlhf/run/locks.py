"""One process works in a folder: it holds a lock on OUT/.lock, which the system frees with it."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from rlhf.errors import InputError
from rlhf.run.watchdog import process_has_ended, read_heartbeats

LOCK_FILE = ".lock"
HOLDER = "Process {} on {}"
PROBE_SECONDS = 0.1

_locks: dict[Path, ExitStack] = {}  # of the folders that this process works in


@contextmanager
def locked(folder: Path, go_on: str) -> Iterator[None]:
    """Keep other processes out of a folder until the block ends.

    Raises:
        InputError: as in `lock`.
    """
    lock(folder, go_on)
    try:
        yield
    finally:
        _locks.pop(folder).close()


def lock(folder: Path, go_on: str) -> None:
    """Keep other processes out of a folder; the system unlocks it when this process ends.

    Args:
        folder: of a stage.
        go_on: what to do after the other process was stopped, for the message.

    Raises:
        InputError: another process works in it.
    """
    if folder in _locks:
        return
    with ExitStack() as stack:
        file = stack.enter_context((folder / LOCK_FILE).open("a+", encoding="utf-8"))
        if not take(file):
            time.sleep(PROBE_SECONDS)  # `is_locked` may have looked just now
            if not take(file):
                file.seek(0)
                raise InputError(
                    f"{file.read() or 'Another process'} is working in {folder}",
                    f"Wait for it, or stop it and {go_on}; or choose another --out.",
                )
        file.truncate(0)
        file.write(HOLDER.format(os.getpid(), socket.gethostname()))
        file.flush()
        _locks[folder] = stack.pop_all()


def take(file: IO[str]) -> bool:
    """Lock a file; False if another process has locked it, True also where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_locked(folder: Path) -> bool:
    """Whether a process works in a folder.

    Where the file system has no locks, the folder's heartbeats decide.
    """
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return not all(map(process_has_ended, read_heartbeats(folder / "heartbeat")))
    return False


def holder(folder: Path) -> int | None:
    """The process on this machine that works in a folder; None if there is none here."""
    if not is_locked(folder):
        return None
    fields = (folder / LOCK_FILE).read_text(encoding="utf-8").split(" ", 3)
    is_here = len(fields) == 4 and fields[3] == socket.gethostname() and fields[1].isdecimal()
    return int(fields[1]) if is_here else None
