"""The speed of a finished run, from which `rlhf plan --like` forecasts another.

The utilization of a phase is what the formulas of `rlhf.planning.forecast` count for that run, over
its seconds and the rate of a matrix product: padding, waiting and what the formulas leave out are
in it. What remains of its time is beginning and end.
"""

from dataclasses import dataclass
from typing import Any

from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.planning.forecast import (
    ASSUMED,
    TERA,
    Amount,
    Operations,
    Phase,
    Phases,
    Speed,
    Stage,
    count_operations,
)
from rlhf.planning.plan import STAGES
from rlhf.planning.planner import read_shape
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir

CLOCKS: dict[Phase, str] = {
    "sampling": "seconds/sample",
    "scoring": "seconds/score",
    "training": "seconds/update",
}


@dataclass(frozen=True)
class Trial:
    """A finished run.

    Attributes:
        stage: what it was.
        path: its folder.
        reported: how much it did: the fields of `Amount` that its report has.
        speed: how fast.
        parameters: of its model.
    """

    stage: Stage
    path: str
    reported: dict[str, Any]
    speed: Speed
    parameters: int


def read_trial(run: RunDir) -> Trial:
    """The speed of a run of train-reward, reference or ppo.

    Raises:
        InputError: it is none of these, has not finished, or its report has no measurements.
    """
    stage = run.read_stage().get("stage")
    if stage not in STAGES or not run.is_done:
        raise InputError(
            f"{run.path} is not a finished run of train-reward, reference or ppo",
            "Give the --out of one, for example of a few steps.",
        )
    report = run.read_report()
    has_speed = report.get("amount") and (report.get("use") or report.get("phases"))
    if not has_speed or "learning_curve" in report:  # whose time is that of several trainings
        raise InputError(
            f"The report of {run.path} does not say how much it did and how fast",
            "Runs of earlier versions, resumed reference outputs, ensembles and learning curves do "
            "not: make a short run for this, or give --tflops and --utilization.",
        )
    with run.reading_report():
        settings, content = read_settings_file(run.config_file), run.read_stage()
        amount = Amount().changed(report["amount"])
        rank = lora_rank_of(stage, settings)
        name = stage_of(stage, rank)
        shape = read_shape(run.inputs["model"]["path"])
        operations = count_operations(name, shape, amount, rank)
        if stage == "reference":
            operations.steps["sampling"] *= report["phases"]["sampled_fraction"]
        seconds = _seconds_of_phases(run, stage, report)
        processes = int(content.get("processes", 1))
        whole = content["device_seconds"] / processes
        speed = _speed_of(operations, seconds, _rate(report) * TERA, processes, whole)
    return Trial(name, str(run.path), report["amount"], speed, shape.parameters)


def stage_of(stage: str, lora_rank: int | None) -> Stage:
    """The row of the forecast that a stage belongs to."""
    names: dict[str, Stage] = {"reward": "reward", "reference": "reference", "ppo": "ppo"}
    adapted: dict[str, Stage] = {"reward": "reward_lora", "ppo": "ppo_lora"}
    return names[stage] if lora_rank is None else adapted.get(stage, names[stage])


def lora_rank_of(stage: str, settings: dict[str, Any]) -> int | None:
    """The rank of the adapters that a run trained, by its config.yaml; None without."""
    lora = settings.get("lora") or {}
    if stage == "reward" and settings.get("adapter", "none") == "none":
        return None
    return lora.get("rank")


def _rate(report: dict[str, Any]) -> float:
    """10¹² operations a second of a matrix product, measured when the run began."""
    return float((report.get("use") or report["phases"])["matmul_tflops"])


def _seconds_of_phases(run: RunDir, stage: str, report: dict[str, Any]) -> Phases:
    if stage == "reward":
        return {"training": report["training_seconds"]}
    if stage == "reference":
        return {phase: report["phases"][f"{phase}_seconds"] for phase in ("sampling", "scoring")}
    rows = read_metrics(run.metrics_file)
    return {phase: sum(row[clock] for row in rows) for phase, clock in CLOCKS.items()}


def _speed_of(
    operations: Operations, seconds: Phases, rate: float, processes: int, whole: float
) -> Speed:
    """The speed that explains a run of `whole` seconds on each of its processes."""
    utilization = dict(ASSUMED)  # of what it did not do, such as sampling what was reused
    for phase, taken in seconds.items():
        if taken and operations.steps[phase]:
            utilization[phase] = operations.steps[phase] / processes / (rate * taken)
    speed = Speed(rate, utilization, 0.0)
    around = sum(Operations({}, operations.around).seconds(speed).values()) / processes
    start = whole - sum(seconds.values()) - around
    return Speed(rate, utilization, max(start, 0.0))
