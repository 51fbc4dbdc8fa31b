"""How long a running stage still takes: one estimate for `rlhf status` and the page Runs.

It is what the stage counts itself, else what the same stage took in an earlier round of the loop.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rlhf.run.loops.commands import FOLDERS, read_commands
from rlhf.run.rundir import RunDir
from rlhf.run.telemetry.progress_count import duration
from rlhf.run.watchdog import running_heartbeat


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a running stage does, and the time that is left.

    Args:
        doing: what it does now; empty if nothing tells.
        share: of what it counts that is done.
        left_seconds: estimate of the time that is left; None without a measure.
    """

    doing: str = ""
    share: float | None = None
    left_seconds: float | None = None


def estimate(run: RunDir, usual_left: float | None) -> Estimate:
    """What a running stage does, and the time left.

    If it counts only a part of its work, the rest is known only from an earlier round.

    Args:
        run: where the stage writes its heartbeat.
        usual_left: what is left of the time that it took in an earlier round.
    """
    heartbeat = running_heartbeat(run.heartbeat)
    if heartbeat is None:
        return Estimate(left_seconds=usual_left)
    doing, work = heartbeat.doing, heartbeat.work
    if work is None:
        return Estimate(doing=doing, left_seconds=usual_left)
    left = work.left()
    if left is None:
        return Estimate(doing=doing, share=work.share, left_seconds=usual_left)
    if work.is_stage:
        return Estimate(doing=doing, share=work.share, left_seconds=left)
    return Estimate(
        doing=f"{doing}, about {duration(left)} left of this part",
        share=work.share,
        left_seconds=None if usual_left is None else max(left, usual_left),
    )


def usual_seconds(entries: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    """The seconds that a stage took when it last succeeded; None if it never did.

    Args:
        entries: of commands.json.
        stage: its command.
    """
    took = [
        entry["seconds"] for entry in entries if entry["stage"] == stage and entry["exit_code"] == 0
    ]
    return took[-1] if took else None


def seconds_since(started_at: str) -> float:
    """Seconds since a time in ISO format."""
    return max(0.0, time.time() - datetime.fromisoformat(started_at).timestamp())


def left_of(usual: float | None, seconds: float) -> float | None:
    """The rest of a usual time; None if that is unknown or used up."""
    return None if usual is None or seconds > usual else usual - seconds


def estimate_in_round(run: RunDir) -> Estimate:
    """The estimate of a stage by its folder, which need not be in a loop.

    Raises:
        InputError: commands.json of the loop is broken.
    """
    folder = run.path.resolve()
    if not folder.parent.name.startswith("round-"):
        return estimate(run, None)
    entries = read_commands(RunDir(folder.parent.parent))
    names = [name for name, its in FOLDERS.items() if its == folder.name]
    own = [entry for entry in entries if entry["stage"] in names]
    is_own = own and f"round-{own[-1]['round']}" == folder.parent.name
    if not is_own or own[-1]["exit_code"] is not None:
        return estimate(run, None)
    seconds = seconds_since(own[-1]["started_at"])
    return estimate(run, left_of(usual_seconds(entries, own[-1]["stage"]), seconds))
