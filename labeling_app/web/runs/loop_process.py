"""Starts and steers the loop: a process of its own, which outlives the server.

The commands are fixed: `rlhf loop --config FILE --config OUT/lead.yaml`, and `rlhf runs ask` or
`votes` with the number of a round. Nothing else that a browser sends becomes a word of them.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from labeling_app.web.runs.log_lines import newest_lines
from labeling_app.web.runs.loop_file import (
    LoopFile,
    OpenSetting,
    flat,
    nested,
    read_values,
    settings_on_page,
)
from rlhf.config import merge, read_settings_file, to_yaml
from rlhf.errors import InputError
from rlhf.records.jsonl import new_file, write_text_atomically
from rlhf.run.locks import holder, is_locked
from rlhf.run.loops.pausing import end_pause, request_pause
from rlhf.run.loops.promotion import promote, roll_back
from rlhf.run.loops.train_now import request_training
from rlhf.run.watchdog import read_heartbeats

RLHF = (sys.executable, "-m", "rlhf.cli")
MAX_SECONDS = 120
END_SECONDS = 30.0


class LoopProcess:
    """The loop of one settings file.

    Args:
        file: the settings file.
    """

    def __init__(self, file: LoopFile) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a loop works in the folder, whoever has started it."""
        return is_locked(self.file.out)

    @property
    def is_starting(self) -> bool:
        """Whether the process that was started here runs, but not yet (or no longer) the loop."""
        return self._is_alive() and not self.is_running

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the last loop ended, if it was started here; None while one runs."""
        if self.is_running and not self._is_alive():
            self._process = None  # another loop has begun since, which was not started here
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the loop, or let it go on; a loop that runs already is not started again.

        A paused loop is ended and started again, so that it reads its settings again.
        """
        with self._lock:
            self._end_paused()
            end_pause(self.file.out)
            if self._is_alive() or self.is_running:
                return
            log = self.file.run.log_file
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as stream:
                self._process = subprocess.Popen(
                    [*_command(self.file.path), *self._lead_words()],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,  # signals to the server do not reach it
                )

    def _end_paused(self) -> None:
        """End a loop on this machine that waits because it is paused, and nothing else."""
        number = holder(self.file.out)
        beats = read_heartbeats(self.file.run.heartbeat)
        if not any(beat.pid == number and beat.phase.startswith("paused") for beat in beats):
            return
        assert number is not None
        os.kill(number, signal.SIGTERM)
        limit = time.monotonic() + END_SECONDS
        while (self.is_running or self._is_alive()) and time.monotonic() < limit:
            time.sleep(0.05)

    def _lead_words(self) -> list[str]:
        """The flags of the lead's values; those that the file no longer opens are left out."""
        values = self.values()
        if not values:
            return []
        self._write(self.file.run.lead_file, values)
        return ["--config", str(self.file.run.lead_file)]

    def pause(self, by: str, *, stops_stage: bool) -> None:
        """Ask the loop to pause: after the running stage, or at once.

        Raises:
            InputError: no loop runs.
        """
        if not self.is_running:
            raise InputError("No loop runs", "There is nothing to pause.")
        request_pause(self.file.out, by, stops_stage=stops_stage)

    def train_now(self, by: str) -> None:
        """Let the round that waits for people train with the rankings there are.

        Raises:
            InputError: none waits, or there are no new rankings.
        """
        request_training(self.file.out, by)

    def promote(self, number: int, by: str) -> None:
        """Promote the policy of a round.

        Raises:
            InputError: it cannot be promoted.
        """
        promote(self.file.out, number, by)

    def roll_back(self, by: str) -> None:
        """Return to the policy that was promoted before.

        Raises:
            InputError: nothing is promoted.
        """
        roll_back(self.file.out, by)

    def ask_people(self, number: int) -> tuple[int, int]:
        """Put the pairs of a round's evaluation on the board.

        Returns:
            How many are new there, and how many people vote on each of them.

        Raises:
            InputError: the round is not evaluated, or the command runs already or fails otherwise.
        """
        output = self._ask("ask", number)
        return int(output["queued"]), int(output["people_per_pair"])

    def count_votes(self, number: int) -> None:
        """Read people's votes on these pairs into the reports.

        Raises:
            InputError: there are none, or the command runs already or fails otherwise.
        """
        self._ask("votes", number)

    def _ask(self, action: str, number: int) -> dict[str, Any]:
        """Run in a process of its own, which leaves the board its processor."""
        arguments = ["runs", action, str(self.file.out), "--round", str(number), "--json"]
        if not self._asking.acquire(blocking=False):  # impatient presses would fill the memory
            raise InputError(
                "The server is already putting pairs on the board or counting votes",
                "Wait a minute, then press the button again.",
            )
        try:
            output: dict[str, Any] = json.loads(_run([*RLHF, *arguments]).splitlines()[-1])
        finally:
            self._asking.release()
        return output

    def values(self) -> dict[str, Any]:
        """The values that leads have set, by the path of the setting."""
        file = self.file.run.lead_file
        return flat(read_settings_file(file), self.file.open) if file.is_file() else {}

    def open_settings(self) -> list[OpenSetting]:
        """The settings that leads may change, with the values that the file has now.

        If the file cannot be read, they are those it had when the server started.
        """
        written: dict[str, Any] = {}
        with suppress(InputError):
            written = flat(read_settings_file(self.file.path), self.file.open)
        return [
            replace(setting, value=written.get(setting.name, setting.value))
            for setting in self.file.open
        ]

    def current_values(self) -> dict[str, Any]:
        """`rounds` and `stop_without_gain` as the next start has them."""
        path = self.file.path
        file = read_settings_file(path) if path.is_file() else {}
        values = {"rounds": self.file.rounds, "stop_without_gain": self.file.stop_without_gain}
        written = {name.replace("-", "_"): value for name, value in file.items()}
        for name, value in {**written, **self.values()}.items():
            if name in values and type(value) is type(values[name]):
                values[name] = value
        return values

    def change(self, given: Mapping[str, Any]) -> None:
        """Keep a lead's values for the next start, if `rlhf loop` accepts them.

        Raises:
            InputError: one of them is not open, of another kind, or out of its range.
        """
        wanted = read_values(self.file.open, given)
        with self._lock:
            self._keep({**self.values(), **wanted})

    def unset(self, name: Any) -> None:
        """Let a setting be again what the file says, if `rlhf loop` accepts that.

        Raises:
            InputError: no lead has set it, or the command refuses what is left.
        """
        with self._lock:
            values = self.values()
            if not isinstance(name, str) or name not in values:
                raise InputError(
                    "This setting is that of the file already", "Reload the page to see it."
                )
            del values[name]
            self._keep(values)

    def _keep(self, values: Mapping[str, Any]) -> None:
        with new_file(self.file.run.lead_file) as candidate:
            self._write(candidate, values)
            _require_accepted([*_command(self.file.path), "--config", str(candidate)])

    def _write(self, path: Path, values: Mapping[str, Any]) -> None:
        text = to_yaml(merge({}, nested(values)))
        write_text_atomically(path, lambda stream: stream.write(text))

    def log(self) -> list[str]:
        """The last lines that the loop has said; empty if it was never started here."""
        return newest_lines(self.file.run.log_file)


def _command(path: Path) -> list[str]:
    return [*RLHF, "loop", "--config", str(path)]


def _require_accepted(command: list[str]) -> None:
    """Let the command check its settings, without running anything.

    Raises:
        InputError: it refuses them; the message is its own, with settings named as on the page.
    """
    try:
        _run([*command, "--dry-run"])
    except InputError as error:
        raise InputError(*settings_on_page(error.problem, error.remedy)) from None


def _run(command: list[str]) -> str:
    """Run a short command and return what it prints.

    Raises:
        InputError: it fails; the message is its own.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"The server could not do that within {MAX_SECONDS} seconds", "Try again later."
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        at = max((n for n, line in enumerate(lines) if line.startswith("error ")), default=None)
        if at is None:
            logging.getLogger(__name__).error(done.stderr)
            raise InputError("The command failed", "The server's log says why.")
        error_lines = lines[at:]
        raise InputError(
            error_lines[0].removeprefix("error "), " ".join(map(str.strip, error_lines[1:]))
        )
    return done.stdout
