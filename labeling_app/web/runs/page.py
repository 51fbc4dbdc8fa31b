"""The values that the Runs page shows now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labeling_app.annotators.comparisons import VoteCount, count_votes
from labeling_app.db.connection import Connections
from labeling_app.web.lead.frame import Filter
from labeling_app.web.runs import picture
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.progress import RoundView, clock, read_rounds
from labeling_app.web.runs.stopped import (
    how_to_go_on,
    more_of_verdict,
    verdict,
    what_to_do,
    why_it_stopped,
)
from rlhf.planning.price import cost_in_words
from rlhf.records.wording import PEOPLE, counted, judge_in_words, num_people
from rlhf.run.intervals import in_words as rate_in_words
from rlhf.run.loops.pausing import Pause, read_pause
from rlhf.run.loops.promotion import (
    evaluated_rounds,
    promoted_round,
    read_promotions,
    round_before,
)
from rlhf.run.loops.train_now import Waiting, read_waiting
from rlhf.run.telemetry.progress_count import duration
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

# What each stage of a round does, for people who do not know the commands.
STAGES = {
    "import": "reads the prompts in",
    "generate": "the model writes responses to rank",
    "round": "the newest policy writes responses to rank",
    "annotate": "a program ranks the responses",
    "export": "collects the rankings",
    "train-reward": "a reward model learns what people prefer",
    "reference": "the model's own responses, to compare with",
    "ppo": "trains the policy for higher rewards",
    "evaluate": "compares the policy with the models before it",
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the loop does, and what a lead may do with it.

    Args:
        name: not started, starting, running, waiting, pausing, paused, done, failed, interrupted
            or killed.
        sentence: the same in a sentence.
        may_start: the word on the button that starts the loop; empty: it runs.
        may_pause: whether it can be asked to pause.
        may_train: whether it waits for rankings, and can be asked to train with those there are.
        advice: what to do next, if there is something to say.
        waits_for: what the newest round waits for before it goes on; empty: it does not wait.
        samples: how many of this round's own samples are ranked; empty in the first round.
        lacks_own_rankings: whether none of them is, and all rankings are of other tasks.
        more: of the verdict in `sentence`, when the loop has stopped.
        why: why it has stopped, without figures.
        figures: its newest round in figures, if that is why.
        options: what a lead can do with a loop that has stopped.
    """

    name: str
    sentence: str
    may_start: str = ""
    may_pause: bool = False
    may_train: bool = False
    advice: str = ""
    waits_for: str = ""
    samples: str = ""
    lacks_own_rankings: bool = False
    more: str = ""
    why: str = ""
    figures: str = ""
    options: Sequence[str] = ()

    @property
    def is_idle(self) -> bool:
        """Whether no stage runs, because the round waits for people or for its time."""
        return self.name == "waiting" and bool(self.waits_for)


def _rate(rate: dict[str, Any] | None) -> str:
    return "–" if rate is None else rate_in_words(rate)


def left_of(view: RoundView, status: Status) -> str:
    """How long a round still takes, or what it waits for; empty where nobody can know."""
    if view.is_done:
        return ""
    return status.waits_for or (view.left_in_words if status.name == "running" else "")


def before_promotion(view: RoundView) -> str:
    """A warning before the promotion of a policy that people have not found better, or ""."""
    if not view.result:
        return f"The report of the loop does not say yet whether round {view.number} gained."
    other = f"the policy of round {view.number - 1}" if view.number else "the original model"
    rate = view.result["win_rate"]["before"]
    if view.has_gained:
        judge = view.result["judge"]
        return (
            ""
            if judge == PEOPLE
            else (
                f"{judge_in_words(judge)} prefers this policy to {other}: it wins {_rate(rate)}. "
                "No people have voted."
            )
        )
    verb = "lost" if view.result["outcome"] == "worse" else "did not gain"
    return f"Round {view.number} {verb}: its policy wins {_rate(rate)} against {other}."


FILTERS: dict[str, Filter] = {
    "duration": duration,
    "clock": clock,
    "rate": _rate,
    "left_of": left_of,
    "before_promotion": before_promotion,
    "people": num_people,
}


def content(process: LoopProcess, connections: Connections) -> dict[str, Any]:
    """The values of the page's template.

    Args:
        process: the loop.
        connections: the label database, which has people's votes.

    Raises:
        InputError: a file of the loop is broken.
    """
    out = process.file.out
    rounds = read_rounds(process.file, is_running=process.is_running)
    history = read_promotions(out)
    results = [view.result for view in rounds if view.result]
    return {
        "status": status_of(process),
        "exit_code": process.exit_code,
        "rounds": rounds,
        "cost": _cost(process),
        "points": picture.points(results),
        "picture": picture,
        "numbers": [result["round"] for result in results],
        "evaluated": evaluated_rounds(out),
        "promoted": promoted_round(history),
        "before": round_before(history),
        "history": history,
        "settings": process.open_settings(),
        "values": process.values(),
        "log": process.log(),
        "name": str(out),
        "phrases": STAGES,
        "vote_counts": _votes(rounds, connections),
    }


def _votes(rounds: Sequence[RoundView], connections: Connections) -> dict[int, VoteCount]:
    """By round, how many votes are in, where the database has the pairs and knows their tasks."""
    db = str(connections.path.resolve())
    by_round = {view.number: view.asked for view in rounds if view.asked}
    return {
        number: count_votes(connections, asked.tasks)
        for number, asked in by_round.items()
        if asked.db == db
    }


def _cost(process: LoopProcess) -> str:
    """The cost of the loop so far, as its report counted when a round ended; empty before."""
    run = process.file.run
    report = run.read_report() if run.report_json.is_file() else {}
    return cost_in_words(report["cost"]) if report.get("rounds") and "cost" in report else ""


def status_of(process: LoopProcess) -> Status:
    """What the loop does now.

    Raises:
        InputError: a file of the loop is broken.
    """
    if process.is_running:
        return _running(process, read_pause(process.file.out))
    if process.is_starting:
        return Status(name="starting", sentence="The loop is starting.")
    run = process.file.run
    content = run.read_stage()
    status = content.get("status")
    if status is None:
        return Status(name="not started", sentence="Not started yet.", may_start="Start")
    if status == "done":
        return _stopped(process, run.read_report() if run.report_json.is_file() else {})
    name, sentence = ENDS.get(status, (status, status))
    error, _, advice = str(content.get("error", "")).partition("\n")
    return Status(
        name=name, sentence=sentence.format(error=error), advice=advice.strip(), may_start="Resume"
    )


def _stopped(process: LoopProcess, report: Mapping[str, Any]) -> Status:
    blocked = how_to_go_on(process, report)
    may_start = "" if blocked else "Start"
    if not report.get("rounds"):
        sentence = f"Stopped: {report.get('stopped')}"
        return Status(name="done", sentence=sentence, advice=blocked, may_start=may_start)
    why, figures = why_it_stopped(report)
    return Status(
        name="done",
        sentence=verdict(report["rounds"]),
        more=more_of_verdict(report["rounds"]),
        why=why,
        figures=figures,
        options=what_to_do(process, report, blocked),
        may_start=may_start,
    )


def what_it_waits_for(waiting: Waiting) -> str:
    """A sentence on what a round waits for: its time, or how many rankings of people."""
    if waiting.wanted is None:
        return f"Waits for its time: {counted(waiting.new, 'new ranking')} so far."
    wanted = counted(waiting.wanted, "new ranking")
    return f"Waits for people: {waiting.new:,} of {wanted}."


def what_is_missing(waiting: Waiting) -> str:
    """What a lead can do while a round waits for rankings."""
    has_some = waiting.new > 0
    if waiting.missing <= waiting.possible:
        return "Train now starts the round with the rankings there are." if has_some else ""
    is_one = waiting.missing == 1
    missing = "1 ranking is" if is_one else f"{waiting.missing:,} rankings are"
    return (
        f"{missing} missing, and the open tasks can give only "
        f"{waiting.possible:,}. Import more prompts on the Data page"
        + (", or train now." if has_some else ".")
    )


def _running(process: LoopProcess, pause: Pause | None) -> Status:
    beats = read_heartbeats(process.file.run.heartbeat)
    phase = next((beat.phase for beat in beats if not process_has_ended(beat)), "starting")
    sentence = f"{phase[:1].upper()}{phase[1:]}."
    if pause is None:
        name = "waiting" if phase.startswith("waiting") else "running"
        waiting = read_waiting(process.file.out)  # also while prompts that have come get responses
        status = Status(name=name, sentence=sentence, may_pause=True)
        if waiting is None:
            return status
        status = replace(status, waits_for=what_it_waits_for(waiting))
        if name == "running":
            return status
        return replace(
            status,
            may_train=waiting.new > 0,
            advice=what_is_missing(waiting),
            samples=waiting.about_samples,
            lacks_own_rankings=waiting.lacks_own_rankings,
        )
    if phase.startswith("paused"):
        sentence = f"Paused by {pause.by} since {clock(pause.at)}."
        return Status(name="paused", sentence=sentence, may_start="Resume", waits_for="Paused.")
    action = "saves its state and stops" if pause.stops_stage else "ends"
    sentence += f" {pause.by} has asked for a pause: the loop waits when this {action}."
    return Status(
        name="pausing", sentence=sentence, may_start="Resume", may_pause=not pause.stops_stage
    )
