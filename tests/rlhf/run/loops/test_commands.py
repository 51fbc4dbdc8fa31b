"""What the commands of a loop took that have no run folder, worked out by hand."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf.records.jsonl import write_json
from rlhf.run.loops.commands import read_commands, seconds_on_devices, with_last_seconds
from rlhf.run.rundir import RunDir

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def entry(stage: str, seconds: float | None = None, code: int | None = 0) -> dict[str, Any]:
    """A line of commands.json; without seconds nobody saw the end."""
    began = {"round": 0, "stage": stage, "started_at": BEGAN.isoformat()}
    return {**began, "exit_code": None} if seconds is None else {
        **began, "exit_code": code, "seconds": seconds
    }  # fmt: skip


def loop(folder: Path, *entries: dict[str, Any]) -> RunDir:
    write_json(folder / "commands.json", {"commands": list(entries)})
    return RunDir(folder)


def test_every_attempt_of_what_samples_or_ranks_counts(tmp_path: Path) -> None:
    run = loop(
        tmp_path,
        entry("import", 1000.0),  # needs no device
        entry("generate", 100.0, 75),
        entry("generate", 20.0),
        entry("annotate", 3.0),
        entry("export", 1000.0),
        entry("ppo", 1000.0),  # in its stage.json
        entry("round", 0.5),
    )
    assert seconds_on_devices(run) == 123.5
    assert seconds_on_devices(RunDir(tmp_path / "new")) == 0


def test_a_command_without_an_end_counts_until_its_last_heartbeat(tmp_path: Path) -> None:
    run = loop(tmp_path, entry("generate"), entry("annotate", 3.0), entry("generate"))
    assert seconds_on_devices(run) == 3.0
    assert "seconds" not in with_last_seconds(run, read_commands(run))[-1]  # no heartbeat yet
    beat = tmp_path / "round-0" / "generate" / "heartbeat" / "rank-00000.json"
    write_json(beat, {})
    os.utime(beat, (BEGAN.timestamp() + 40, BEGAN.timestamp() + 40))
    assert seconds_on_devices(run) == 43.0  # of the last attempt, whose heartbeat it is
    last = with_last_seconds(run, read_commands(run))[-1]
    assert (last["seconds"], last["exit_code"]) == (40.0, None)


@pytest.mark.parametrize(("stage", "folder"), [("train-reward", "reward"), ("ppo", "ppo")])
def test_the_heartbeat_of_a_stage_is_in_its_run_folder(
    tmp_path: Path, stage: str, folder: str
) -> None:
    run = loop(tmp_path, entry(stage))
    beat = tmp_path / "round-0" / folder / "heartbeat" / "rank-00000.json"
    write_json(beat, {})
    os.utime(beat, (BEGAN.timestamp() + 3600, BEGAN.timestamp() + 3600))
    assert with_last_seconds(run, read_commands(run))[-1]["seconds"] == 3600.0
    earlier = BEGAN.timestamp() - 10  # of an attempt before
    os.utime(beat, (earlier, earlier))
    assert "seconds" not in with_last_seconds(run, read_commands(run))[-1]


@pytest.mark.parametrize("entries", [[], [entry("ppo", 5.0)]])
def test_nothing_is_added_to_what_has_ended(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    assert with_last_seconds(RunDir(tmp_path), entries) == entries
