"""The cost of stages: hours of devices and of annotators, and the price of the devices' hours.

device-hours = seconds of a stage · processes / 3600, over all its attempts
price        = device-hours · price of a device for an hour
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.records.ranked import read_manifest
from rlhf.run.intervals import outcome
from rlhf.run.loops.commands import seconds_on_devices
from rlhf.run.rundir import RunDir, device_seconds

HOUR = 3600
JUDGES = ("people", "ai", "gold", "reward")  # the most trustworthy one first

Cost = dict[str, Any]


def cost_of(run: RunDir, price_per_hour: float | None) -> Cost:
    """The cost of a stage until now.

    Args:
        run: its folder.
        price_per_hour: of one device; None: only hours are known.
    """
    return cost_of_stages([run], price_per_hour)


def cost_of_stages(runs: Sequence[RunDir], price_per_hour: float | None) -> Cost:
    """The cost of several stages together.

    The annotators' hours are in the manifest of the export that a stage trains on; the newest
    export has all of them.
    """
    return _cost(runs, sum(map(device_seconds, runs)), price_per_hour)


def cost_of_loop(run: RunDir, price_per_hour: float | None) -> Cost:
    """The cost of all rounds of a loop until now, also of commands that have no run folder.

    Args:
        run: of the loop.
        price_per_hour: of one device; None: only hours are known.
    """
    stages = [RunDir(file.parent) for file in sorted(run.path.glob("round-*/*/stage.json"))]
    seconds = sum(map(device_seconds, stages)) + seconds_on_devices(run)
    return _cost(stages, seconds, price_per_hour)


def _cost(runs: Sequence[RunDir], seconds: float, price_per_hour: float | None) -> Cost:
    hours = [_annotator_hours(_rankings_of(run)) for run in runs]
    return {
        **cost_of_seconds(seconds, price_per_hour),
        "annotator_hours": max((value for value in hours if value is not None), default=None),
    }


def cost_of_seconds(seconds: float, price_per_hour: float | None) -> Cost:
    """The cost of some device-seconds; no annotator's hours belong to them.

    Worked example: 1,800 device-seconds at 3 an hour are half an hour and cost 1.5.
    """
    hours = seconds / HOUR
    return {
        "device_hours": round(hours, 9),
        "price_per_hour": price_per_hour,
        "price": None if price_per_hour is None else round(hours * price_per_hour, 6),
        "annotator_hours": None,
    }


def cost_of_chain(
    run: RunDir, price_per_hour: float | None, win_rate: Mapping[str, Mapping[str, Any]]
) -> Cost:
    """The cost of an evaluation and of the stages that made its policy, with a price per point."""
    return with_price_per_point(cost_of_stages(_chain(run), price_per_hour), win_rate)


def with_price_per_point(
    cost: Mapping[str, Any], win_rate: Mapping[str, Mapping[str, Any]]
) -> Cost:
    """A cost with the price of a point of these win rates.

    A point is a hundredth of win rate above one half, by the most trustworthy judge. A policy that
    is not proven better has no price for a point.
    """
    judge = next((name for name in JUDGES if name in win_rate), None)
    gained = judge is not None and outcome(win_rate[judge]) == "better"
    rate = win_rate[judge] if judge and gained else None
    return {**cost, "price_per_point": price_of_a_point(cost["price"], rate)}


def price_of_a_point(price: float | None, rate: Mapping[str, Any] | None) -> float | None:
    """A price divided by the points of a win rate above one half; None where it has none.

    People are asked only about responses that differ; equal ones count one half here, as with every
    other judge. Worked example: 30 for 80 % of 40 prompts, with equal responses to 40 more, are 2
    for each of 15 points.

    Args:
        price: of all that led to it.
        rate: `value`, and of people's votes `n`, the prompts, and `same_answers`, the others.
    """
    if price is None or rate is None:
        return None
    points = 100 * (rate["value"] - 0.5)
    if equal := rate.get("same_answers"):
        points *= rate["n"] / (rate["n"] + equal)
    return round(price / points, 6) if points > 0 else None


def _chain(run: RunDir) -> list[RunDir]:
    """An evaluation and the stages that made its policy, as far as their folders are still there.

    Of its other inputs only those count that made the policy, too: not a judge, nor what the policy
    is compared with.
    """
    stages: dict[Path, RunDir] = {run.path.resolve(): run}
    paths = [input_path(run, "policy")]
    while paths:
        path = paths.pop()
        for stage in map(RunDir, (path, path.parent)):
            folder = stage.path.resolve()
            if folder not in stages and stage.stage_file.is_file():
                stages[folder] = stage
                paths += [input_path(stage, name) for name in stage.inputs]
    return list(stages.values())


def input_path(run: RunDir, name: str) -> Path:
    """Where an input of a stage is; a relative path also counts from where the stage was started.

    Args:
        run: the stage.
        name: of the input, such as policy or rankings.
    """
    path, begun = Path(run.inputs[name]["path"]), begun_in(run)
    candidates = [*([begun / path] if begun else []), path]
    there = (
        candidate
        for candidate in candidates
        if candidate.exists() or RunDir(candidate.parent).stage_file.is_file()
    )
    return next(there, path)


def begun_in(run: RunDir) -> Path | None:
    """The folder in which a stage was started; None where its --out does not tell."""
    settings = read_settings_file(run.config_file) if run.config_file.is_file() else {}
    out, path = Path(settings.get("out") or "/"), run.path.resolve()
    if out.is_absolute() or not out.parts or path.parts[-len(out.parts) :] != out.parts:
        return None
    return path.parents[len(out.parts) - 1]


def _rankings_of(run: RunDir) -> Path | None:
    return input_path(run, "rankings") if "rankings" in run.inputs else None


def _annotator_hours(rankings: Path | None) -> float | None:
    """From the manifest of an export; None where it has none, as exports of earlier versions."""
    if rankings is None:
        return None
    try:
        hours = read_manifest(rankings).get("annotator_hours")
    except InputError:  # it was moved since
        return None
    return None if hours is None else float(hours)


def cost_in_words(cost: Mapping[str, Any]) -> str:
    """A cost in a sentence: what of it is known."""
    sentence = f"Cost: {amount(cost['device_hours'])} device-hours"
    if cost["price"] is not None:
        sentence += f" at {amount(cost['price_per_hour'])} each: {amount(cost['price'])}"
    if cost["annotator_hours"]:
        sentence += f", and {amount(cost['annotator_hours'])} annotator-hours"
    if cost.get("price_per_point") is not None:
        sentence += f"; {amount(cost['price_per_point'])} for a point of win rate"
    return f"{sentence}."


def amount(value: float) -> str:
    """Hours or a price with three significant digits, those before the point whole: 1,234."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
