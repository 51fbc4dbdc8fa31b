"""Commands that end before they are done: killed, or made to look as if they had been stopped."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import read_heartbeats
from tests.servers.commands import start_process


def kill_when(arguments: list[str], path: Path, lines: int) -> None:
    """Start a command and send SIGKILL as soon as a file is there with that many lines."""
    kill_once(arguments, lambda: path.is_file() and path.read_bytes().count(b"\n") >= lines)


def kill_in(arguments: list[str], run: Path, phase: str, step: int) -> None:
    """Start a command and send SIGKILL in a phase of a step, or of a later one."""

    def is_there() -> bool:
        heartbeats = read_heartbeats(run / "heartbeat")
        return any(heartbeat.phase == phase and heartbeat.step >= step for heartbeat in heartbeats)

    kill_once(arguments, is_there)


def kill_once(arguments: list[str], is_time: Callable[[], bool]) -> None:
    """Start a command and send SIGKILL when it is time."""
    process = start_process(*arguments)
    limit = time.monotonic() + 600
    while time.monotonic() < limit and process.poll() is None:
        if is_time():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    process.wait()
    assert process.returncode == -signal.SIGKILL


def stop_after(run: RunDir, step: int) -> None:
    """Let a finished training be one that was stopped, though its later checkpoints are there."""
    write_json(run.stage_file, {**run.read_stage(), "status": "interrupted"})
    latest = run.checkpoints / "latest"
    if latest.is_file():
        latest.write_text(f"step-{step:06d}")
    for late in run.checkpoints.glob("checkpoint-*"):
        if int(late.name.rpartition("-")[2]) > step:
            shutil.rmtree(late)
