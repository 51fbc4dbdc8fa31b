"""OUT/commands.json of a loop: every command with its start, its end and its exit code."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rlhf.records.documents import read_document
from rlhf.run.rundir import RunDir

ON_DEVICES = ("generate", "round", "annotate")  # of the commands that have no run folder
# Run folders in that of a round; other commands have only heartbeats, in a folder of their name.
FOLDERS = {"train-reward": "reward", "reference": "reference", "ppo": "ppo", "evaluate": "evaluate"}


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


def with_last_seconds(run: RunDir, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries, the last one with its seconds even if the loop was killed before its end.

    It counts until its last heartbeat, as a stage that was killed; without one it has no seconds.

    Args:
        run: of the loop.
        entries: of commands.json.
    """
    copies = [dict(entry) for entry in entries]
    if copies and copies[-1]["exit_code"] is None:
        last = copies[-1]
        folder = run_folder(run, last["round"], last["stage"])
        began = datetime.fromisoformat(last["started_at"]).timestamp()
        beats = [file.stat().st_mtime for file in folder.heartbeat.glob("rank-*.json")]
        if beats and max(beats) >= began:
            last["seconds"] = round(max(beats) - began, 1)
    return copies


def run_folder(run: RunDir, number: int, stage: str) -> RunDir:
    """Where a stage of a round writes, at least its heartbeat.

    Args:
        run: of the loop.
        number: of the round, from 0.
        stage: its command.
    """
    return RunDir(run.path / f"round-{number}" / FOLDERS.get(stage, stage))


def seconds_on_devices(run: RunDir) -> float:
    """Seconds of all attempts of the commands that use a device and have no run folder.

    These are `generate`, `round` and `annotate`; each counts as one device for as long as it runs,
    also while a judge's endpoint answers. What others use is in their stage.json.
    """
    entries = with_last_seconds(run, read_commands(run))
    return sum(float(entry.get("seconds", 0)) for entry in entries if entry["stage"] in ON_DEVICES)
