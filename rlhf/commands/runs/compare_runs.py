"""Several runs in one table: steps, win rate, KL, hours and price of each."""

from collections.abc import Mapping
from os.path import relpath
from pathlib import Path
from typing import Any

from rlhf.planning.price import amount, cost_of, cost_of_stages
from rlhf.records.schema import is_finite_number
from rlhf.run.intervals import in_words
from rlhf.run.rundir import RunDir
from rlhf.run.status import ABSENT, Run, StageStatus, align

POLICIES = ("ppo", "dpo", "distill", "sft", "quantize")  # what makes them
TRAININGS = (*POLICIES[:-1], "reward")  # whose steps count: the first there is
PAID = (*TRAININGS, "reference", "evaluate")  # stages that a policy needs
COST = ("device_hours", "price", "price_per_point")
HEAD = [
    *("run", "steps", "win rate", "judge", "KL"),
    *("tokens/s", "device-hours", "price", "price of a point"),
]


def summaries(name: str, run: Run) -> dict[str, dict[str, Any]]:
    """What a run did, what it reached, how fast and at what cost; None where it is not known.

    The main policy of a run has the run's name: that of the first of TRAININGS. Every other one
    that was evaluated has a line of its own, such as `runs/first: distill`; of a loop only the last
    one. Win rate, KL and cost are of the last evaluation of this policy; that cost is of all stages
    that made it, wherever they are. Without an evaluation, the KL is what the training measured at
    its end, and the cost is of the stages in the run's folder that make or judge policies.
    """
    evaluated = _evaluated(run)
    last = {stage["stage"]: stage for stage in run.values()}
    trained = [training for training in TRAININGS[:-1] if training in last]
    kind = (*trained, *map(_kind, evaluated), TRAININGS[-1])[0]
    first = next((key for key in reversed(evaluated) if _kind(key) == kind), None)
    other_evaluation = _other_evaluation(run, has_policy=bool(trained))
    main = evaluated.pop(first) if first else (last.get(kind), other_evaluation)
    more = {f"{name}: {key}": _summary(run, *pair) for key, pair in evaluated.items()}
    return {name: _summary(run, *main), **more}


def _kind(name: str) -> str:
    """The stage of a name: `ppo` of `ppo in two`."""
    return name.partition(" in ")[0]


def _evaluated(run: Run) -> dict[str, tuple[StageStatus, StageStatus]]:
    """The stages that made a policy of the run, each with its last finished evaluation, by name.

    The rounds of a loop share a name.
    """
    evaluated = {}
    for evaluation in _evaluations(run):
        if evaluation["status"] != "done":
            continue
        folders = _policy_folders(evaluation)
        for name, stage in run.items():
            folder = Path(stage["path"]).resolve()
            if stage["stage"] in POLICIES and folder in folders:
                in_loop = name.endswith(f" in {folder.parent.name}")
                evaluated[stage["stage"] if in_loop else name] = (stage, evaluation)
    return evaluated


def _of_kind(run: Run, kind: str) -> list[StageStatus]:
    return [stage for stage in run.values() if stage["stage"] == kind]


def _evaluations(run: Run) -> list[StageStatus]:
    """The last to end is last."""
    return sorted(_of_kind(run, "evaluate"), key=lambda stage: stage["finished_at"] or "")


def _policy_folders(evaluation: StageStatus) -> set[Path]:
    """Where the policy of an evaluation is, or was made: also after all moved together."""
    given = RunDir(Path(evaluation["path"])).inputs.get("policy")
    if given is None:
        return set()
    path, out = Path(given["path"]), evaluation["settings"].get("out")
    locations = [path, *([Path(evaluation["path"], relpath(path, str(out)))] if out else [])]
    return {folder.resolve() for location in locations for folder in (location, location.parent)}


def _other_evaluation(run: Run, *, has_policy: bool) -> StageStatus | None:
    """The last evaluation; in a run with a policy, the last that does not say of which policy."""
    evaluations = _evaluations(run)
    if has_policy:
        evaluations = [evaluation for evaluation in evaluations if not _policy_folders(evaluation)]
    return evaluations[-1] if evaluations else None


def _summary(
    run: Run, training: StageStatus | None, evaluation: StageStatus | None
) -> dict[str, Any]:
    judged = _report(evaluation)
    judge = judged.get("verdict.judge")
    rate = {key: judged.get(f"win_rate.{judge}.{key}") for key in ("value", "low", "high")}
    nats = [report.get("kl.reverse.nats") for report in (judged, _report(training))]
    has_steps = training and training["stage"] in TRAININGS
    return {
        "steps": training["steps"] if training and has_steps else None,
        "win_rate": None if rate["value"] is None else rate,
        "judge": judge,
        "kl": next((value for value in nats if value is not None), None),
        "tokens_per_second": _report(training).get("use.tokens_per_second"),
        **_cost(run, judged),
    }


def _report(stage: StageStatus | None) -> Mapping[str, Any]:
    """The report of a finished stage, with dotted names; empty before."""
    return stage["report"] if stage and stage["status"] == "done" else {}


def _cost(run: Run, evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    if evaluation.get("cost.device_hours") is not None:
        return {name: evaluation.get(f"cost.{name}") for name in COST}
    stages = [stage for stage in run.values() if stage["stage"] in PAID]
    prices = [_price(stage) for stage in stages]
    known = [price for price in prices if price is not None]
    folders = [RunDir(Path(stage["path"])) for stage in stages]
    return {
        "device_hours": cost_of_stages(folders, None)["device_hours"],
        "price": round(sum(known), 6) if known and len(known) == len(prices) else None,
        "price_per_point": None,
    }


def _price(stage: StageStatus) -> float | None:
    """The price of a stage, also before it has a report; None where it was given no price."""
    price: float | None = _report(stage).get("cost.price")
    per_hour = stage["settings"].get("price_per_hour")
    if price is None and is_finite_number(per_hour):
        price = cost_of(RunDir(Path(stage["path"])), per_hour)["price"]
    return price


def comparison(compared: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each run or policy, by what `summaries` says of it."""
    return align([HEAD, *(_line(name, summary) for name, summary in compared.items())])


def _line(name: str, summary: Mapping[str, Any]) -> list[str]:
    rate = summary["win_rate"]
    return [
        name,
        ABSENT if summary["steps"] is None else f"{summary['steps']:,}",
        in_words({**rate, "low": rate["low"] if rate["high"] is not None else None})
        if rate
        else ABSENT,
        summary["judge"] or ABSENT,
        ABSENT if summary["kl"] is None else f"{summary['kl']:z.2f}",
        *(
            ABSENT if summary[key] is None else amount(summary[key])
            for key in ("tokens_per_second", *COST)
        ),
    ]
