"""A loop that waits for people: how many rankings there are, and the request to train at once.

The request names its round, so it stays valid if the loop is killed, and never starts a later one.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.errors import InputError
from rlhf.records.documents import Kinds
from rlhf.records.jsonl import write_json
from rlhf.records.wording import counted
from rlhf.run.locks import is_locked
from rlhf.run.loops.pausing import read_pause, read_request
from rlhf.run.rundir import RunDir

KINDS: Kinds = {"round": int, "new": int, "wanted": int | None, "possible": int}
OF_SAMPLES: Kinds = {"samples": int, "samples_ranked": int, "of_samples": int}


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a round waits for.

    Args:
        round: its number.
        new: how many rankings are new.
        wanted: how many start it; None where only a time does.
        possible: how many rankings the open tasks can still give.
        samples: how many tasks the round itself has put on the board; none in the first round,
            where every task is its own.
        samples_ranked: how many of these somebody has ranked.
        of_samples: how many of the new rankings are of these.
    """

    round: int
    new: int
    wanted: int | None
    possible: int
    samples: int = 0
    samples_ranked: int = 0
    of_samples: int = 0

    @property
    def missing(self) -> int:
        """How many rankings are missing."""
        return max(0, (self.wanted or 0) - self.new)

    @property
    def lacks_own_rankings(self) -> bool:
        """Whether all new rankings are of other tasks than those of the round's own samples."""
        return self.samples > 0 and self.new > 0 and not self.samples_ranked

    @property
    def about_samples(self) -> str:
        """How many of the round's own samples are ranked, and what else the new rankings are of.

        Empty in the first round. Rankings that were made since the last export, also while the
        round before was trained, are new whatever they are of; imports, live mode and feedback
        are from elsewhere.
        """
        if not self.samples:
            return ""
        tasks = f"this round's {counted(self.samples, 'new sample')}"
        verb = "is" if self.samples_ranked < 2 else "are"
        ranked = f"{self.samples_ranked:,}" if self.samples_ranked else "None"
        yet = "" if self.samples_ranked else " yet"
        message = f"{ranked} of {tasks} {verb} ranked on the board{yet}"
        others = max(0, self.new - self.of_samples)
        if not others:
            return f"{message}."
        which = f"all {others:,}" if others == self.new else f"{others:,} of the {self.new:,}"
        if self.new == 1:
            return f"{message}; the new ranking is of another task or from elsewhere."
        return f"{message}; {which} new rankings are of other tasks or from elsewhere."


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
    content = read_request(RunDir(out).waiting_file, {**KINDS, **OF_SAMPLES})
    if not content:
        return None
    more = {name: content[name] for name in OF_SAMPLES if name in content}  # not of older loops
    return Waiting(**{name: content[name] for name in KINDS}, **more)


def request_training(out: Path, by: str) -> Waiting:
    """Ask the loop in a folder to train with the rankings there are. Returns what it waited for.

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
    return waiting


def training_requested_by(out: Path, number: int) -> str | None:
    """Who asked to train a round at once; None if nobody did.

    Raises:
        InputError: the file is broken.
    """
    file = RunDir(out).train_now_file
    content = read_request(file, {"round": int, "by": str})
    by: str | None = content["by"] if content.get("round") == number else None
    return by
