"""Waiting for people, for a time, and while the loop is paused."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from labeling_app.db.board.overlap import num_wanted
from labeling_app.db.store import Store
from rlhf.commands.loop.children import say
from rlhf.commands.loop.new_rankings import Exported, count_new, count_of_tasks
from rlhf.commands.loop.schedule import next_start
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.wording import next_command
from rlhf.records.wording import counted
from rlhf.run.loops.asking import num_asked
from rlhf.run.loops.pausing import read_pause
from rlhf.run.loops.train_now import (
    Waiting,
    end_waiting,
    training_requested_by,
    write_waiting,
)
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import beat

POLL_SECONDS = 2.0
SECONDS_BETWEEN_LINES = 60.0


def wait_while_paused(run: RunDir, number: int) -> None:
    """Return at once, or when a loop that was asked to pause may go on.

    Args:
        run: of the loop.
        number: of the round.
    """
    pause = read_pause(run.path)
    if pause is None:
        return
    say(
        f"\nPaused by {pause.by}. To go on: rlhf runs resume {shlex.quote(str(run.path))}  "
        "(or Resume on the Runs page)"
    )
    while pause is not None:
        beat(f"paused by {pause.by}", number)
        time.sleep(POLL_SECONDS)
        pause = read_pause(run.path)
    say("Resumed.")


def wait_for_rankings(
    check: "RankingCheck", sample_responses: Callable[[Callable[[], bool]], None]
) -> None:
    """Return when there are enough new rankings, or one and it is time.

    Also returns when somebody asks to train at once and there is one. Prints how many there are and
    how many are missing: at once, when there are enough, and in between when the number has
    changed, at most once a minute.

    Args:
        check: says whether the round can begin.
        sample_responses: to prompts that have come without any; called between two checks. Its
            argument returns True once the round can begin.
    """
    while True:
        wait_while_paused(check.run, check.number)
        if check.poll():
            end_waiting(check.run.path)
            return
        sample_responses(check.poll)
        time.sleep(POLL_SECONDS)


@final
@dataclass(eq=False)
class RankingCheck:
    """Whether a round has enough new rankings, as `wait_for_rankings` says; prints how many.

    Args:
        run: of the loop.
        settings: of the loop: the database, how many rankings to wait for, and the time.
        export: as in `count_new`.
        number: of the round.
        after: as in `count_new`.
        began: when the round began.
        own: the tasks of the samples that the round has put on the board.
    """

    run: RunDir
    settings: LoopSettings
    export: Any
    number: int
    after: Exported
    began: datetime
    own: Sequence[int] = ()

    def __post_init__(self) -> None:
        start_at = self.settings.start_at
        self._start = next_start(start_at, self.began) if start_at else None
        self._said, self._said_at = -1, 0.0
        self._shown: Waiting | None = None
        self._is_ready = False

    def poll(self) -> bool:
        """Read the database, publish the count, and say whether the round can begin.

        Once it can, nothing is read again.
        """
        if not self._is_ready:
            self._is_ready = self._read_count()
        return self._is_ready

    def _read_count(self) -> bool:
        own = count_of_tasks(self.settings.database, self.own, self.export)
        count, now = count_new(self.settings.database, self.after, self.export), datetime.now(UTC)
        new, wanted = count["new"], self.settings.new_rankings
        waiting = replace(
            self._waiting(count, wanted),
            samples=len(self.own),
            samples_ranked=own["ranked"],
            of_samples=own["rankings"],
        )
        if waiting != self._shown:
            write_waiting(self.run.path, waiting)
            self._shown = waiting
        if self.settings.start_at and self._start and now >= self._start and not new:
            self._start = next_start(self.settings.start_at, now)  # nothing to train on
        start = self._start
        ready = (start is not None and now >= start) or (wanted is not None and new >= wanted)
        asks = new and not ready
        asked_by = training_requested_by(self.run.path, self.number) if asks else None
        if asked_by:
            say(f"{asked_by} starts the training with the rankings there are.")
            ready = True
        beat(f"waiting for rankings: {_count_words(new, wanted, start)}", self.number)
        self._say(waiting, count["open"], ready=ready)
        return ready

    def _waiting(self, count: dict[str, int], wanted: int | None) -> Waiting:
        able = max(0, count["open"] - num_asked(self.run.path))  # votes are no rankings
        waiting = Waiting(round=self.number, new=count["new"], wanted=wanted, possible=able)
        if waiting.missing <= able:  # one from each open task is enough
            return waiting
        with Store(self.settings.database, read_only=True) as store:
            return replace(waiting, possible=num_wanted(store.connections))

    def _say(self, waiting: Waiting, open_tasks: int, *, ready: bool) -> None:
        """Print how many rankings there are, if that is due."""
        is_first = self._said < 0
        if is_first and not ready:
            when = _when(self.settings.new_rankings, self._start)
            label = next_command("label", db=self.settings.database)
            command = label.replace("Next", "People rank with")
            say(f"\nRound {self.number} trains {when}.\n{command}")
        is_late = time.monotonic() - self._said_at >= SECONDS_BETWEEN_LINES
        if is_first or ready or (waiting.new != self._said and is_late):
            advice = "" if ready else _advice(waiting, self.run.path)
            samples = f" {waiting.about_samples}" if self.own else ""
            say(_progress(waiting, open_tasks) + samples + advice)
            self._said, self._said_at = waiting.new, time.monotonic()


def _count_words(new: int, wanted: int | None, start: datetime | None) -> str:
    """How many rankings there are, and what starts the round, for the heartbeat."""
    progress = f"{new:,}" if wanted is None else f"{new:,} of {wanted:,}"
    return progress + (f", or at {_clock(start)}" if start else "")


def _when(wanted: int | None, start: datetime | None) -> str:
    """When a round trains, in words."""
    if wanted is None and start:
        return f"at {_clock(start)} if there is a new ranking by then"
    more = f", or at {_clock(start)} with at least one" if start else ""
    return f"when there are {counted(wanted or 0, 'new ranking')}{more}"


def _clock(start: datetime) -> str:
    return f"{start.astimezone():%Y-%m-%d %H:%M}"


def _progress(waiting: Waiting, open_tasks: int) -> str:
    there, wanted = waiting.new, waiting.wanted
    line = (
        f"{counted(there, 'new ranking')}; "
        if wanted is None
        else f"{there:,} of {counted(wanted, 'new ranking')}, {waiting.missing:,} missing; "
    )
    return f"{line}{counted(open_tasks, 'task')} open."


def _advice(waiting: Waiting, out: Path) -> str:
    """Advice where the open tasks cannot give all rankings that are missing."""
    if waiting.missing <= waiting.possible:
        return ""
    able = f" They can give {counted(waiting.possible, 'ranking')}." if waiting.possible else ""
    otherwise = (
        f"train now: rlhf runs train {shlex.quote(str(out))} (or Train now on the Runs page)"
        if waiting.new
        else "start the loop again with a smaller --new-rankings"
    )
    return f"{able} Import more prompts (rlhf import, or the Data page), or {otherwise}."
