"""Pausing a loop: a request on disk, which the loop reads before each command and while it waits.

The request stays until somebody resumes the loop, even if the loop is killed and started again.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf.errors import InputError
from rlhf.records.documents import Kinds, read_document
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir

KINDS: Kinds = {"by": str, "at": str, "stops_stage": bool}


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Who asked a loop to pause, and when.

    Args:
        by: the name of the person.
        at: the time, in ISO format.
        stops_stage: the running stage saves its state and stops; else it ends first.
    """

    by: str
    at: str
    stops_stage: bool = False


def request_pause(out: Path, by: str, *, stops_stage: bool = False) -> Pause:
    """Ask the loop in a folder to pause. A later request replaces an earlier one."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    pause = Pause(by=by, at=at, stops_stage=stops_stage)
    write_json(RunDir(out).pause_file, asdict(pause))
    return pause


def end_pause(out: Path) -> bool:
    """Let the loop in a folder go on. Returns whether it had been asked to pause."""
    was_asked = RunDir(out).pause_file.exists()
    RunDir(out).pause_file.unlink(missing_ok=True)
    return was_asked


def read_request(file: Path, kinds: Kinds) -> dict[str, Any]:
    """A file that another process may delete at any moment; nothing if it is not there.

    Raises:
        InputError: the file is broken.
    """
    try:
        return read_document(file, kinds)
    except InputError:
        if file.exists():
            raise
        return {}


def read_pause(out: Path) -> Pause | None:
    """The request to pause; None if there is none.

    Raises:
        InputError: the file is broken.
    """
    content = read_request(RunDir(out).pause_file, KINDS)
    if not content:
        return None
    return Pause(by=content["by"], at=content["at"], stops_stage=content["stops_stage"])
