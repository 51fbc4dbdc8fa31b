"""Messages on a loop that has stopped: is the policy better, why it stopped, what to do."""

from collections.abc import Mapping, Sequence
from typing import Any

from labeling_app.web.runs.loop_process import LoopProcess
from rlhf.errors import InputError
from rlhf.records.wording import OWN_JUDGE, PEOPLE, judge_in_words
from rlhf.run.intervals import outcome
from rlhf.run.loops.asking import read_asked
from rlhf.run.loops.promotion import promoted_round, read_promotions
from rlhf.run.rundir import RunDir

OUTCOMES = {
    "better": "{policy} is better than {other}: it wins {share} of the comparisons",
    "worse": "{policy} is worse than {other}: it wins only {share} of the comparisons",
    "unproven": "{policy} is not proven better than {other}: it wins {share} of the comparisons, "
    "which can be chance",
}
# A judge that is not people.
PREFERENCES = {
    **OUTCOMES,
    "better": "{judge} prefers {policy} to {other} in {share} of the comparisons",
    "worse": "{judge} prefers {other}: {policy} wins only {share} of the comparisons",
}


def verdict(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Whether the newest policy is better than the one before, for people who read no statistics.

    Args:
        rounds: those of the loop's report.json.
    """
    newest = rounds[-1]
    number = newest["round"]
    other = f"that of round {number - 1}" if number else "the original model"
    judge, policy = newest["judge"], f"the policy of round {number}"
    rate, comparison = newest["win_rate"]["before"], newest["outcome"]
    message = _compared(rate, comparison, judge, policy=policy, other=other)
    return (
        f"{message} No people have voted."
        if comparison == "better" and judge != PEOPLE
        else message
    )


def more_of_verdict(rounds: Sequence[Mapping[str, Any]]) -> str:
    """How the newest policy compares with the original model, and who says so."""
    newest = rounds[-1]
    rate, message = newest["win_rate"]["original"], ""
    if newest["round"] and rate:
        judge, other = newest["judge"], "the original model"
        message = f"{_compared(rate, outcome(rate), judge, policy='it', other=other)} "
    if newest["judge"].endswith(OWN_JUDGE):
        return f"{message}The judge is the reward model that trained it, which alone proves little."
    return f"{message}Judged by {newest['judge']}."


def _compared(
    rate: Mapping[str, Any], comparison: str, judge: str, *, policy: str, other: str
) -> str:
    share, who = f"{100 * rate['value']:.0f} %", judge_in_words(judge)
    sentences = OUTCOMES if judge == PEOPLE else PREFERENCES
    message = sentences[comparison].format(judge=who, policy=policy, other=other, share=share)
    return f"{message[0].upper()}{message[1:]}."


def why_it_stopped(report: Mapping[str, Any]) -> tuple[str, str]:
    """Why no other round has begun, and the newest round in figures, if that is why.

    Args:
        report: report.json of the loop. Those of earlier versions have no `stopped_by`.
    """
    stopped = str(report["stopped"])
    match report.get("stopped_by", "unknown"):
        case "rounds":
            return f"The loop has stopped because {stopped}", ""  # 3 of 3 rounds are done
        case "stop_without_gain" as by:
            return f"The loop has stopped because this round is not a proven gain ({by}).", stopped
        case None:
            return "The loop had stopped, but people's votes show a gain now.", stopped
        case _:
            return f"The loop has stopped. {stopped}", ""


def what_to_do(process: LoopProcess, report: Mapping[str, Any], blocked: str) -> list[str]:
    """A lead's options now, the most useful first.

    Args:
        process: the loop.
        report: its report.json.
        blocked: what has to change before another round can start; empty: nothing.

    Raises:
        InputError: a file of the loop is broken.
    """
    rounds = report["rounds"]
    newest, out = rounds[-1], process.file.out
    gained = [entry["round"] for entry in rounds if entry["outcome"] == "better"]
    promoted = promoted_round(read_promotions(out))
    options = []
    if gained and (promoted is None or promoted < gained[-1]):  # a later one is the lead's choice
        options.append(f"Promote the policy of round {gained[-1]}, the newest that gained.")
    if not gained:
        options.append("Keep the original model: no round is a proven gain.")
    number = newest["round"]
    if newest["judge"] != PEOPLE:
        asked = read_asked(RunDir(out / f"round-{number}" / "evaluate"))
        options.append(
            f"Ask people about round {number}: they are the best judge, and were not asked."
            if asked is None
            else f"Count votes on round {number} once people have voted: then they are the judge."
        )
    return [*options, blocked or "Start begins another round."]


def how_to_go_on(process: LoopProcess, report: Mapping[str, Any]) -> str:
    """What has to change before a loop that is done can go on; empty if it can.

    The rule is that of `rlhf loop` (`reason_to_stop`).

    Args:
        process: the loop.
        report: its report.json.
    """
    try:
        rounds, values = report.get("rounds", []), process.current_values()
    except InputError as error:  # somebody is editing the file
        return str(error)
    limits: list[tuple[str, str, str]] = []
    if rounds and len(rounds) >= values["rounds"]:
        limits.append(("rounds", str(values["rounds"]), f"{len(rounds) + 1} or more"))
    if rounds and values["stop_without_gain"] and rounds[-1]["outcome"] != "better":
        limits.append(("stop_without_gain", "yes", "no"))
    if not limits:
        return ""
    is_open = {setting.name for setting in process.file.open}
    reason = " and ".join(f"{name} is {value}" for name, value, _ in limits)
    changes = " and ".join(
        f"{name} to {wanted} "
        + (
            "under Settings"
            if name in is_open
            else f"in {process.file.path.name} (ask whoever started the app)"
        )
        for name, _, wanted in limits
    )
    return f"Another round cannot start while {reason}. Set {changes}; then Start appears here."
