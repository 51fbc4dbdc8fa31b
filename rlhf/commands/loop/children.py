"""Runs one command after another as child processes, never two at once.

A child holds a lock on OUT/.child as long as it lives: it inherits the open file. A loop that is
killed leaves its child running; the next loop finds the lock taken and waits until that child has
ended. The system frees the lock with the process, so nothing has to be cleaned up.

OUT/commands.json lists every command with its start, its end and its exit code.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from rlhf.commands.loop.stages import Stage
from rlhf.errors import InterruptedRunError, RlhfError
from rlhf.records.jsonl import write_json
from rlhf.run.locks import take
from rlhf.run.loops.commands import read_commands, with_last_seconds
from rlhf.run.loops.pausing import read_pause
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import beat

POLL_SECONDS = 1.0
STDERR = 2  # stdout is for the result of the loop


class StageFailedError(RlhfError):
    """A command of a round failed; it has said why. Has its exit code."""

    def __init__(self, stage: Stage, code: int) -> None:
        super().__init__(
            f"rlhf {stage.name} of round {stage.number} ended with exit code {code}",
            f"Repeat it by itself: {stage.command}\n  Then type the command of the loop again.",
        )
        self.exit_code = code


def say(text: str) -> None:
    """Tell people what happens, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def run_stage(
    run: RunDir,
    stage: Stage,
    launch: Sequence[str] = (),
    *,
    is_over: Callable[[], bool] = lambda: False,
    **facts: Any,
) -> bool:
    """Run a command of a round and wait until it ends.

    Args:
        run: of the loop.
        stage: the command.
        launch: words put before it.
        is_over: whether the command should end now; asked every second unless the loop is paused.
        facts: kept in commands.json.

    Returns:
        False if it was stopped, by `is_over` or to pause the loop: it has to run again.

    Raises:
        StageFailedError: it failed.
        InterruptedRunError: it was interrupted or killed.
    """
    stage.write_settings()
    wait_for_earlier_child(run)
    say(f"\nRound {stage.number}: {shlex.join([*launch, 'rlhf', *stage.arguments])}")
    beat(f"round {stage.number}: {stage.name}", stage.number)
    entries = with_last_seconds(run, read_commands(run))  # all have ended
    began = time.time()
    entry = {"round": stage.number, "stage": stage.name, "command": ["rlhf", *stage.arguments]}
    entry |= {"started_at": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    _write_commands(run, [*entries, entry | {"exit_code": None}])
    process = _start(run, stage, launch)
    stopped = False
    try:
        stopped = _wait(run, process, is_over)
    except BaseException:  # Ctrl-C, or a look that failed
        _end(process)
        raise
    finally:
        code = process.returncode
        entry |= {"exit_code": code, "seconds": round(time.time() - began, 1)}
        _write_commands(run, [*entries, entry])
    if stopped and code:
        return False
    if code < 0 or code == InterruptedRunError.exit_code:
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else "was interrupted"
        raise InterruptedRunError(
            f"rlhf {stage.name} of round {stage.number} {ending}",
            "Type the command of the loop again to go on"
            + (". If memory ran out, use smaller batches." if code < 0 else "."),
        )
    if code:
        raise StageFailedError(stage, code)
    return True


def _wait(run: RunDir, process: "subprocess.Popen[bytes]", is_over: Callable[[], bool]) -> bool:
    """Wait until a child ends; whether it was asked to stop."""
    stopped = False
    while True:
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            why = None if stopped else _why_to_stop(run, is_over)
            if why is not None:
                say(f"{why}: waiting for the command to save its state and end.")
                process.terminate()
                stopped = True
        else:
            return stopped


def _why_to_stop(run: RunDir, is_over: Callable[[], bool]) -> str | None:
    """Why a child should stop now; None where it should not."""
    pause = read_pause(run.path)
    if pause is not None:
        return f"Paused by {pause.by}" if pause.stops_stage else None
    return "The round can begin" if is_over() else None


def _write_commands(run: RunDir, entries: list[dict[str, Any]]) -> None:
    write_json(run.commands_file, {"commands": entries})


def wait_for_earlier_child(run: RunDir) -> None:
    """Wait until the child of a loop that was killed has ended."""
    with _lock_file(run) as file:
        if take(file):
            return
        file.seek(0)
        say(
            f"{file.read() or 'A command'}, which an earlier loop has started, still runs: "
            "waiting until it ends."
        )
        beat("waiting for a command of an earlier loop")
        while not take(file):
            time.sleep(POLL_SECONDS)


def _start(run: RunDir, stage: Stage, launch: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a command that holds the lock as long as it lives."""
    command = [*launch, sys.executable, "-m", "rlhf.cli", *stage.arguments]
    with _lock_file(run) as file:
        is_alone = take(file)
        assert is_alone, "a child of an earlier loop runs"  # it was waited for
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            pass_fds=[file.fileno()],
            env=os.environ | stage.environment,
            process_group=0,  # Ctrl-C in a terminal reaches only the loop, which ends the child
        )
        file.truncate(0)
        file.write(f"rlhf {stage.name} (process {process.pid})")
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a child to stop, and wait until it has; Ctrl-C kills it."""
    say("Waiting for the command to save its state and end. Ctrl-C kills it.")
    process.terminate()
    try:
        process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lock_file(run: RunDir) -> IO[str]:
    return (run.path / ".child").open("a+", encoding="utf-8")
