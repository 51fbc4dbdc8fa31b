"""What the Runs page shows as of now."""

from dataclasses import dataclass
from typing import Any

from labeling_app.web.runs import picture
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.progress import clock, in_words, read_rounds
from rlhf.run.intervals import in_words as rate_in_words
from rlhf.run.loops.pausing import Pause, read_pause
from rlhf.run.loops.promotion import (
    evaluated_rounds,
    promoted_round,
    read_promotions,
    round_before,
)
from rlhf.run.watchdog import process_has_ended, read_heartbeats

# By the status in stage.json of a loop whose process is gone.
ENDS = {
    "failed": ("failed", "Failed: {error}"),
    "interrupted": ("interrupted", "Interrupted. Resume goes on where it was."),
    "running": (
        "killed",
        "The loop's process has ended without saying why: it was killed, or the machine "
        "restarted. Resume goes on where it was.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the loop does, and what a lead may do with it.

    Args:
        name: not started, starting, running, waiting, pausing, paused, done, failed, interrupted
            or killed.
        words: the same in a sentence.
        may_start: the word on the button that starts the loop; empty: it runs.
        may_pause: whether it can be asked to pause.
    """

    name: str
    words: str
    may_start: str = ""
    may_pause: bool = False


def _rate(rate: dict[str, Any] | None) -> str:
    return "–" if rate is None else rate_in_words(rate)


FILTERS = {"duration": in_words, "clock": clock, "rate": _rate}


def content(process: LoopProcess) -> dict[str, Any]:
    """The values of the page's template.

    Raises:
        InputError: a file of the loop is broken.
    """
    out = process.file.out
    rounds = read_rounds(process.file, is_running=process.is_running)
    history = read_promotions(out)
    results = [one.result for one in rounds if one.result]
    return {
        "status": status_of(process),
        "exit_code": None if process.is_starting else process.exit_code,
        "rounds": rounds,
        "points": picture.points(results),
        "picture": picture,
        "numbers": [one["round"] for one in results],
        "evaluated": evaluated_rounds(out),
        "promoted": promoted_round(history),
        "before": round_before(history),
        "history": history,
        "settings": process.file.open,
        "values": process.values(),
        "log": process.log(),
        "name": str(out),
    }


def status_of(process: LoopProcess) -> Status:
    """What the loop does now.

    Raises:
        InputError: a file of the loop is broken.
    """
    if process.is_running:
        return _running(process, read_pause(process.file.out))
    if process.is_starting:
        return Status(name="starting", words="The loop is starting.")
    run = process.file.run
    content = run.read_stage()
    status = content.get("status")
    if status is None:
        return Status(name="not started", words="Not started yet.", may_start="Start")
    if status == "done":
        stopped = run.read_report().get("stopped") if run.report_json.is_file() else None
        return Status(name="done", words=f"Stopped: {stopped}", may_start="Start")
    name, words = ENDS.get(status, (status, status))
    error = str(content.get("error", "")).partition("\n")[0]
    return Status(name=name, words=words.format(error=error), may_start="Resume")


def _running(process: LoopProcess, pause: Pause | None) -> Status:
    beats = read_heartbeats(process.file.run.heartbeat)
    phase = next((one.phase for one in beats if not process_has_ended(one)), "starting")
    words = f"{phase[:1].upper()}{phase[1:]}."
    if pause is None:
        name = "waiting" if phase.startswith("waiting") else "running"
        return Status(name=name, words=words, may_pause=True)
    if phase.startswith("paused"):
        words = f"Paused by {pause.by} since {clock(pause.at)}."
        return Status(name="paused", words=words, may_start="Resume")
    ends = "saves its state and stops" if pause.stops_stage else "ends"
    words += f" {pause.by} has asked for a pause: the loop waits when this {ends}."
    return Status(name="pausing", words=words, may_start="Resume", may_pause=not pause.stops_stage)
