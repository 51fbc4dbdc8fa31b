"""A loop that waits for people: how many rankings there are, and the request to train at once.

The request names its round, so it stays valid if the loop is killed, and never starts a later one.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.errors import InputError
from rlhf.records.documents import Kinds
from rlhf.records.jsonl import write_json
from rlhf.run.locks import is_locked
from rlhf.run.loops.pausing import read_pause, read_request
from rlhf.run.rundir import RunDir

KINDS: Kinds = {"round": int, "new": int, "wanted": int | None, "possible": int}


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a round waits for.

    Args:
        round: its number.
        new: how many rankings are new.
        wanted: how many start it; None where only a time does.
        possible: how many rankings the open tasks can still give.
    """

    round: int
    new: int
    wanted: int | None
    possible: int

    @property
    def missing(self) -> int:
        """How many rankings are missing."""
        return max(0, (self.wanted or 0) - self.new)


def write_waiting(out: Path, waiting: Waiting) -> None:
    """Let the Runs page know what the loop in a folder waits for."""
    write_json(RunDir(out).waiting_file, asdict(waiting))


def end_waiting(out: Path) -> None:
    """The loop in a folder no longer waits."""
    RunDir(out).waiting_file.unlink(missing_ok=True)


def read_waiting(out: Path) -> Waiting | None:
    """What the loop in a folder waits for; None if none runs there, or it does not wait.

    Raises:
        InputError: the file is broken.
    """
    if not is_locked(out) or read_pause(out) is not None:
        return None
    content = read_request(RunDir(out).waiting_file, KINDS)
    if not content:
        return None
    return Waiting(**{name: content[name] for name in KINDS})


def request_training(out: Path, by: str) -> int:
    """Ask the loop in a folder to train with the rankings there are. Returns how many are new.

    Raises:
        InputError: it does not wait for rankings, or none is new.
    """
    waiting = read_waiting(out)
    if waiting is None:
        raise InputError(
            f"The loop in {out} does not wait for rankings",
            "Train now starts a round that waits for people. Start or resume the loop first.",
        )
    if not waiting.new:
        raise InputError(
            f"Round {waiting.round} has no new rankings to train on",
            "Wait until somebody has ranked a task.",
        )
    write_json(RunDir(out).train_now_file, {"round": waiting.round, "by": by})
    return waiting.new


def training_requested_by(out: Path, number: int) -> str | None:
    """Who asked to train a round at once; None if nobody did.

    Raises:
        InputError: the file is broken.
    """
    file = RunDir(out).train_now_file
    content = read_request(file, {"round": int, "by": str})
    by: str | None = content["by"] if content.get("round") == number else None
    return by
