"""How far the rounds of a loop are, read from its folder.

The time that is left is an estimate only where there is a measure: what the running stage counts
itself, or the same stage of an earlier round. Else there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from labeling_app.web.runs.loop_file import LoopFile
from rlhf.run.loops.asking import Asked, read_asked
from rlhf.run.loops.commands import FOLDERS, read_commands, run_folder
from rlhf.run.loops.estimates import estimate, left_of, seconds_since, usual_seconds
from rlhf.run.rundir import RunDir
from rlhf.run.telemetry.progress_count import duration


@dataclass(frozen=True, kw_only=True)
class StageView:
    """A stage of a round.

    Args:
        name: of its command.
        status: done, running, stopped or not started.
        seconds: how long it took, or has run.
        doing: what the running one does now.
        share: of what it counts that is done.
        left_seconds: estimate of the time that is left.
    """

    name: str
    status: str
    seconds: float | None = None
    doing: str = ""
    share: float | None = None
    left_seconds: float | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether it is still to be done, for a time that nothing tells."""
        return self.status != "done" and self.left_seconds is None


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """A round: its stages, and what its evaluation found.

    Args:
        number: of the round.
        stages: in the order in which they run.
        result: the round's entry in report.json of the loop, once it is evaluated.
        reports: the pages that can be read: evaluate, reward.
        asked: what people were asked about, if they were.
    """

    number: int
    stages: Sequence[StageView]
    result: Mapping[str, Any] = field(default_factory=dict)
    reports: Sequence[str] = ()
    asked: Asked | None = None

    @property
    def is_done(self) -> bool:
        """Whether all its stages are done."""
        return all(stage.status == "done" for stage in self.stages)

    @property
    def has_gained(self) -> bool:
        """Whether its evaluation has proven a gain."""
        return self.result.get("outcome") == "better"

    @property
    def left_seconds(self) -> float | None:
        """Estimate of the time until the round is done, if there is one for each stage."""
        left = [stage.left_seconds for stage in self.stages if stage.status != "done"]
        known = [seconds for seconds in left if seconds is not None]
        return sum(known) if known and len(known) == len(left) else None

    @property
    def left_in_words(self) -> str:
        """What is left of the round, else of its running stage; empty if neither is known.

        In the first round no stage has run before: only what the running one counts is known.
        """
        if self.left_seconds is not None:
            left = duration(self.left_seconds)
            return f"About {left} left, if every stage takes as long as in the round before."
        for stage in self.stages:
            if stage.status == "running" and stage.left_seconds is not None:
                unknown = [view.name for view in self.stages if view.is_unknown]
                left = f"About {duration(stage.left_seconds)} left in {stage.name}."
                if not unknown:
                    return left
                return f"{left} Not known before a round has done it: {', '.join(unknown)}."
        return ""


def read_rounds(file: LoopFile, *, is_running: bool) -> list[RoundView]:
    """The rounds that were begun, the first one first.

    Args:
        file: the loop.
        is_running: whether the loop runs.

    Raises:
        InputError: a file of the loop is broken.
    """
    run = file.run
    entries = read_commands(run)
    report = run.read_report() if run.report_json.is_file() else {}
    results = {result["round"]: result for result in report.get("rounds", [])}
    numbers = range(max((entry["round"] for entry in entries), default=-1) + 1)
    rounds = []
    for number in numbers:
        stages = [_stage(file, entries, number, name, is_running) for name in _names(file, number)]
        rounds.append(
            RoundView(
                number=number,
                stages=stages,
                result=results.get(number, {}),
                reports=[n for n in ("evaluate", "reward") if report_path(file, number, n)],
                asked=read_asked(RunDir(file.out / f"round-{number}" / "evaluate")),
            )
        )
    return rounds


def report_path(file: LoopFile, number: int, stage: str) -> RunDir | None:
    """The run folder of a finished stage whose page can be read."""
    run = RunDir(file.out / f"round-{number}" / stage)
    return run if run.is_done and run.report_html.is_file() else None


def _names(file: LoopFile, number: int) -> Sequence[str]:
    return file.later if number else file.first


def _stage(
    file: LoopFile, entries: Sequence[Mapping[str, Any]], number: int, name: str, is_running: bool
) -> StageView:
    own = [entry for entry in entries if (entry["round"], entry["stage"]) == (number, name)]
    usual = usual_seconds(entries, name)
    run = run_folder(file.run, number, name)
    if _is_done(entries, own, run.path if name in FOLDERS else None):
        return StageView(name=name, status="done", seconds=_seconds(own))
    if not own:
        return StageView(name=name, status="not started", left_seconds=usual)
    if not (is_running and own[-1]["exit_code"] is None and own[-1] is entries[-1]):
        return StageView(name=name, status="stopped", seconds=_seconds(own), left_seconds=usual)
    seconds = seconds_since(own[-1]["started_at"])
    progress = estimate(run, left_of(usual, seconds))
    return StageView(
        name=name,
        status="running",
        seconds=seconds,
        doing=progress.doing,
        share=progress.share,
        left_seconds=progress.left_seconds,
    )


def _is_done(
    entries: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], folder: Any
) -> bool:
    """Whether a stage is done: by its folder, its exit code, or because others came after it.

    `generate` may run again while the round waits for rankings, for prompts that have come since.
    """
    if folder is not None:
        return RunDir(folder).is_done
    is_last = bool(own) and own[-1] is entries[-1]
    return any(entry["exit_code"] == 0 for entry in own) or (bool(own) and not is_last)


def _seconds(own: Sequence[Mapping[str, Any]]) -> float | None:
    """How long a stage took in all its attempts; None where the end of one is not known."""
    known = [entry["seconds"] for entry in own if "seconds" in entry]
    return sum(known) if known and len(known) == len(own) else None


def clock(text: str) -> str:
    """A time in ISO format as people on this machine read it."""
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M}"
