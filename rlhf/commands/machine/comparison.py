"""Several runs in one table: steps, win rate, KL, hours and price of each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.planning.price import amount, cost_of_stages
from rlhf.run.intervals import in_words
from rlhf.run.rundir import RunDir
from rlhf.run.status import ABSENT, Run, StageStatus, align

TRAININGS = ("ppo", "dpo", "distill", "sft", "reward")  # whose steps count: the first there is
COST = ("device_hours", "price", "price_per_point")
HEAD = [
    *("run", "steps", "win rate", "judge", "KL"),
    *("tokens/s", "device-hours", "price", "price of a point"),
]


def summary(run: Run) -> dict[str, Any]:
    """What a run did, what it reached, how fast and at what cost; None where it is not known.

    Win rate, KL and cost are of its last evaluation; that cost is of all stages that made the
    policy, wherever they are. Without an evaluation, the KL is what the training measured at its
    end, and the cost is of the stages in the run's folder.
    """
    last = {name.partition(" in ")[0]: stage for name, stage in run.items()}
    training = next((last[name] for name in TRAININGS if name in last), None)
    evaluation = _report(last.get("evaluate"))
    judge = evaluation.get("verdict.judge")
    rate = {key: evaluation.get(f"win_rate.{judge}.{key}") for key in ("value", "low", "high")}
    nats = [one.get("kl.reverse.nats") for one in (evaluation, _report(training))]
    return {
        "steps": training["steps"] if training else None,
        "win_rate": None if rate["value"] is None else rate,
        "judge": judge,
        "kl": next((one for one in nats if one is not None), None),
        "tokens_per_second": _report(training).get("use.tokens_per_second"),
        **_cost(run, evaluation),
    }


def _report(stage: StageStatus | None) -> Mapping[str, Any]:
    """The report of a finished stage, with dotted names; empty before."""
    return stage["report"] if stage and stage["status"] == "done" else {}


def _cost(run: Run, evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    if evaluation.get("cost.device_hours") is not None:
        return {name: evaluation.get(f"cost.{name}") for name in COST}
    stages = [RunDir(Path(stage["path"])) for stage in run.values()]
    prices = [_report(stage).get("cost.price") for stage in run.values()]
    known = [price for price in prices if price is not None]
    return {
        "device_hours": cost_of_stages(stages, None)["device_hours"],
        "price": round(sum(known), 6) if len(known) == len(prices) else None,
        "price_per_point": None,
    }


def comparison(compared: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each run, by what `summary` says of it."""
    return align([HEAD, *(_line(name, one) for name, one in compared.items())])


def _line(name: str, one: Mapping[str, Any]) -> list[str]:
    rate = one["win_rate"]
    return [
        name,
        ABSENT if one["steps"] is None else f"{one['steps']:,}",
        in_words({**rate, "low": rate["low"] if rate["high"] is not None else None})
        if rate
        else ABSENT,
        one["judge"] or ABSENT,
        ABSENT if one["kl"] is None else f"{one['kl']:z.2f}",
        *(ABSENT if one[key] is None else amount(one[key]) for key in ("tokens_per_second", *COST)),
    ]
