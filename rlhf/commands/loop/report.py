"""The result of every round, and whether another one should follow.

A round gains if its policy is better than the policy that it began with: the interval of its win
rate against that policy lies above one half, and the sign test finds p below 0.05. The rule is that
of the evaluation's own report (`rlhf.run.intervals.outcome`), the judge its most trustworthy
one. The first round begins with the original model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from rlhf.commands.wording import judge_name
from rlhf.planning.price import JUDGES, cost_of_loop, price_of_a_point
from rlhf.records.ranked import read_manifest
from rlhf.records.wording import OWN_JUDGE, PEOPLE, counted, num_people
from rlhf.run.intervals import in_words, outcome
from rlhf.run.loops.commands import read_commands
from rlhf.run.rundir import RunDir
from rlhf.run.status import align

Round = dict[str, Any]
GAIN = "a gain needs an interval above 50 % and a sign test with p below 0.05"
LOCK_SECONDS = 60.0
KEPT = ("value", "low", "high", "level", "n", "p_value", "same_answers")


@dataclass(frozen=True)
class Stop:
    """Why no other round has begun.

    Args:
        sentence: the reason, for people.
        by: the setting that ends the loop; None where none does any longer, because people's votes
            show a gain since.
    """

    sentence: str
    by: Literal["rounds", "stop_without_gain"] | None


def read_rounds(out: Path) -> list[Round]:
    """The rounds whose evaluation is done, the first one first.

    `new_rankings` is None where somebody else than the loop exported them, `rankings_of_samples`
    (how many of these people made of the round's own samples) in the first round, too.

    Raises:
        InputError: a report is broken.
    """
    rounds: list[Round] = []
    while RunDir(folder := out / f"round-{len(rounds)}" / "evaluate").is_done:
        rounds.append(_read_round(folder.parent, len(rounds)))
    entries = read_commands(RunDir(out))
    exports = {entry["round"]: entry for entry in entries if entry["stage"] == "export"}
    counts = ("new_rankings", "rankings_of_samples")
    return [
        {**record, **{name: exports.get(record["round"], {}).get(name) for name in counts}}
        for record in rounds
    ]


def _read_round(folder: Path, number: int) -> Round:
    reward = RunDir(folder / "reward").read_report()
    run = RunDir(folder / "evaluate")
    with run.reading_report():
        record = summary(number, run.read_report())
    accuracy = reward.get("accuracy")
    return {
        **record,
        "rankings": int(read_manifest(folder / "rankings")["rankings"]),
        "accuracy": accuracy and {name: accuracy[name] for name in ("value", "low", "high")},
    }


def summary(number: int, report: Mapping[str, Any]) -> Round:
    """A summary of the report of a round's evaluation.

    Args:
        number: of the round; from round 1 on, the report also compares with the policy before.
        report: report.json of `rlhf evaluate`.
    """
    against = report["rival"] if number else report
    rates = against["win_rate"]
    judge = next(name for name in (*JUDGES, *rates) if name in rates)
    described = report["judges"][judge]
    kl = report["kl"]
    return {
        "round": number,
        "judge": judge_name(described)
        + (f", {OWN_JUDGE}" if described.get("is_objective") else ""),
        "win_rate": {
            "original": _kept(report["win_rate"].get(judge)),
            "before": _kept(rates[judge]),
        },
        "outcome": outcome(rates[judge]),
        "votes": against.get("votes") if judge == PEOPLE else None,
        "kl": {name: kl[name]["nats"] for name in ("forward", "reverse") if name in kl},
    }


def _kept(rate: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {name: rate[name] for name in KEPT if name in rate} if rate else None


def describe_round(record: Round) -> str:
    """Whether a round gained, with the figures that say so."""
    number, rate = record["round"], record["win_rate"]["before"]
    opponent = f"the policy of round {number - 1}" if number else "the original model"
    p_value = "" if rate.get("p_value") is None else f", sign test p = {rate['p_value']:.2g}"
    gain = "a gain" if record["outcome"] == "better" else "no gain"
    votes = record.get("votes") or {}
    voters = (
        f" ({counted(votes['given'], 'vote')} by {num_people(votes['people'])})"
        if "people" in votes
        else ""
    )
    return (
        f"Round {number}: wins {in_words(rate)}{p_value} against {opponent} on "
        f"{counted(rate['n'], 'prompt')}, judged by {record['judge']}{voters}: {gain}."
    )


def reason_to_stop(rounds: Sequence[Round], limit: int, *, without_gain: bool) -> Stop | None:
    """Why no other round follows; None where one does.

    Args:
        rounds: those that are done.
        limit: maximum number of rounds.
        without_gain: stop after a round that did not gain.
    """
    if not rounds:
        return None
    if without_gain and rounds[-1]["outcome"] != "better":
        reason = f"{describe_round(rounds[-1])} ({GAIN[0].upper()}{GAIN[1:]}.)"
        return Stop(reason, "stop_without_gain")
    done = f"{len(rounds)} of {counted(limit, 'round')} {'is' if len(rounds) == 1 else 'are'} done."
    return Stop(done, "rounds") if len(rounds) >= limit else None


def report_lock(out: Path) -> FileLock:
    """Held while OUT/report.json is made: by the loop, or by whoever reads in people's votes."""
    return FileLock(out / ".report.lock", timeout=LOCK_SECONDS)


def build_report(
    rounds: Sequence[Round], out: Path, stop: Stop | None, price_per_hour: float | None = None
) -> dict[str, Any]:
    """The content of OUT/report.json; its cost is that of all rounds.

    A point of win rate is one of the returned policy against the original model.

    Args:
        rounds: those that are done.
        out: folder of the loop.
        stop: why no other round follows; None where one does.
        price_per_hour: of one device.
    """
    gained = [record["round"] for record in rounds if record["outcome"] == "better"]
    best = str(out / f"round-{gained[-1]}" / "ppo" / "policy") if gained else None
    cost = cost_of_loop(RunDir(out), price_per_hour)
    rate = rounds[gained[-1]]["win_rate"]["original"] if gained else None
    point = price_of_a_point(cost["price"], rate)
    return {
        "rounds": list(rounds),
        "stopped": stop.sentence if stop else None,
        "stopped_by": stop.by if stop else None,
        "policy": best,
        "cost": {**cost, "price_per_point": point},
    }


def table(rounds: Sequence[Round]) -> str:
    """A line for each round."""
    header = ["round", "rankings", "accuracy", "wins against the original"]
    rows = [[*header, "wins against the policy before", "reverse KL, nats"]]
    for record in rounds:
        rates, nats, new = record["win_rate"], record["kl"].get("reverse"), record["new_rankings"]
        rows.append(
            [
                str(record["round"]),
                f"{record['rankings']:,}" + ("" if new is None else f" ({new:,} new)"),
                in_words(record["accuracy"]) if record["accuracy"] else "-",
                in_words(rates["original"]) if rates["original"] else "-",
                in_words(rates["before"]) if record["round"] else "-",
                "-" if nats is None else f"{nats:z.2f}",
            ]
        )
    return align(rows)
