"""OUT/commands.json of a loop: every command with its start, its end and its exit code."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rlhf.records.documents import read_document
from rlhf.run.rundir import RunDir

ON_DEVICES = ("generate", "round", "annotate")  # of the commands without a run folder


def read_commands(run: RunDir) -> list[dict[str, Any]]:
    """The entries of commands.json, oldest first.

    Args:
        run: of the loop.

    Raises:
        InputError: the file is broken.
    """
    if not run.commands_file.is_file():
        return []
    entries: list[dict[str, Any]] = read_document(run.commands_file, {"commands": list})["commands"]
    return entries


def with_seconds(run: RunDir, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries, of which the last one has seconds even if the loop was killed before its end.

    These are counted until the last heartbeat of its command, as those of a stage that was killed.

    Args:
        run: of the loop.
        entries: of commands.json.
    """
    found = [dict(one) for one in entries]
    if found and found[-1]["exit_code"] is None:
        last = found[-1]
        folder = RunDir(run.path / f"round-{last['round']}" / last["stage"])
        began = datetime.fromisoformat(last["started_at"]).timestamp()
        beats = [one.stat().st_mtime for one in folder.heartbeat.glob("rank-*.json")]
        last["seconds"] = round(max([began, *beats]) - began, 1)
    return found


def seconds_on_devices(run: RunDir) -> float:
    """Seconds of all attempts of the commands that use a device and have no run folder.

    Each of them uses one device: `generate`, `round` and `annotate`. What others use is in their
    stage.json.
    """
    entries = with_seconds(run, read_commands(run))
    return sum(float(one.get("seconds", 0)) for one in entries if one["stage"] in ON_DEVICES)
