"""The speed of a finished run, from which `rlhf plan --like` forecasts another.

The utilization of a phase is what the formulas of `rlhf.planning.forecast` count for that run, over
its seconds and the rate of a matrix product: padding, waiting and what the formulas leave out are
in it. Distillation has one clock for sampling and training, whose utilizations keep the ratio that
is assumed. Of PPO the first two steps, in which memory is allocated, are left out where there are
others; of two steps, the first. What remains of a run's time is beginning and end.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.planning.forecast import (
    ASSUMED,
    TERA,
    TITLES,
    Amount,
    Operations,
    Phase,
    Speed,
    Stage,
    count_operations,
)
from rlhf.planning.planner import Shape, read_shape
from rlhf.planning.price import begun_in, input_path
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir

STAGES = ("reward", "reference", "ppo", "sft", "dpo", "distill")
ALLOCATING_STEPS = 2  # whose updates took up to twice as long on a CPU
COMMANDS = "train-reward, reference, ppo, sft, dpo or distill"
CLOCKS: dict[Phase, str] = {
    "sampling": "seconds/sample",
    "scoring": "seconds/score",
    "training": "seconds/update",
}
Clocks = dict[tuple[Phase, ...], float]  # seconds of phases that one clock measures together


@dataclass(frozen=True)
class Trial:
    """A finished run.

    Attributes:
        stage: what it was.
        path: its folder.
        reported: how much it did: the fields of `Amount` that its report has.
        speed: how fast.
        parameters: of its model.
        without_gpu: its machine had no GPU.
        assumed: phases that it skipped, such as sampling where all responses were reused; their
            utilization is assumed.
    """

    stage: Stage
    path: str
    reported: dict[str, Any]
    speed: Speed
    parameters: int
    without_gpu: bool
    assumed: tuple[Phase, ...]


def read_trial(run: RunDir) -> Trial:
    """The speed of a run of train-reward, reference, ppo, sft, dpo or distill.

    Raises:
        InputError: it is none of these, has not finished, or its report has no measurements.
    """
    stage = run.read_stage().get("stage")
    if stage not in STAGES or not run.is_done:
        raise InputError(
            f"{run.path} is not a finished run of {COMMANDS}",
            "Give the --out of one, for example of a few steps.",
        )
    report = run.read_report()
    has_speed = report.get("amount") and (report.get("use") or report.get("phases"))
    if not has_speed or "learning_curve" in report:  # whose time is that of several trainings
        raise InputError(
            f"The report of {run.path} does not say how much it did and how fast",
            "Runs of earlier versions, resumed reference outputs, ensembles, learning curves and "
            "students of reward models do not: make a short run for this, or give --tflops and "
            "--utilization.",
        )
    with run.reading_report():
        settings, content = read_settings_file(run.config_file), run.read_stage()
        amount = Amount().changed(report["amount"])
        rank = lora_rank_of(stage, settings)
        name = stage_of(stage, rank)
        shape, student = _shapes(run, stage)
        operations = count_operations(name, shape, amount, rank, student)
        if stage == "reference":
            operations.steps["sampling"] *= report["phases"]["sampled_fraction"]
        clocks = _clocks_of(run, stage, report)
        processes = int(content.get("processes", 1))
        whole = content["device_seconds"] / processes
        speed = _speed_of(operations, clocks, _rate(report) * TERA, processes, whole)
    return Trial(
        stage=name,
        path=str(run.path),
        reported=report["amount"],
        speed=speed,
        parameters=shape.parameters,
        without_gpu="hardware" in content and not content["hardware"].get("gpus"),
        assumed=tuple(phase for phase, number in operations.steps.items() if not number),
    )


def _shapes(run: RunDir, stage: str) -> tuple[Shape, Shape | None]:
    """The shape of a run's model; of a distillation those of teacher and student."""
    if stage == "distill":
        return _shape_of_input(run, "teacher"), read_shape(str(run.policy))
    return _shape_of_input(run, "model"), None


def _shape_of_input(run: RunDir, name: str) -> Shape:
    """The shape of a model that a run was given.

    A relative path is also looked for where the run was started, which its own --out tells.

    Raises:
        InputError: it is at neither place; says which run named it.
    """
    given = run.inputs[name]["path"]
    try:
        return read_shape(str(input_path(run, name)))
    except InputError as error:
        if Path(given).is_absolute() or Path(given).exists():
            raise
        folder = begun_in(run) or "the folder in which that run was started"
        raise InputError(
            f"{run.path} was started with the {name} {given}, which is not there",
            f"If it is a folder, its path is relative to {folder}: restore it there, or type this "
            f"command where {given} is. If it is a name on the hub, check the connection.",
        ) from error


def stage_of(stage: str, lora_rank: int | None) -> Stage:
    """The row of the forecast that a stage belongs to."""
    adapted = f"{stage}_lora"
    return cast(Stage, adapted if lora_rank is not None and adapted in TITLES else stage)


def lora_rank_of(stage: str, settings: dict[str, Any]) -> int | None:
    """The rank of the adapters that a run trained, by its config.yaml; None without."""
    lora = settings.get("lora") or {}
    if stage == "reward" and settings.get("adapter", "none") == "none":
        return None
    return lora.get("rank")


def _rate(report: dict[str, Any]) -> float:
    """10¹² operations a second of a matrix product, measured when the run began."""
    return float((report.get("use") or report["phases"])["matmul_tflops"])


def _clocks_of(run: RunDir, stage: str, report: dict[str, Any]) -> Clocks:
    if stage == "reward":
        return {("training",): report["training_seconds"]}
    if stage == "reference":
        phases: tuple[Phase, ...] = ("sampling", "scoring")
        return {(phase,): report["phases"][f"{phase}_seconds"] for phase in phases}
    rows = read_metrics(run.metrics_file)
    if stage == "ppo":
        usual = rows[ALLOCATING_STEPS:] or rows[-1:]
        return {
            (phase,): len(rows) * fmean(row[clock] for row in usual)
            for phase, clock in CLOCKS.items()
        }
    whole: tuple[Phase, ...] = ("sampling", "training") if stage == "distill" else ("training",)
    return {whole: sum(row["seconds"] for row in rows)}


def _speed_of(
    operations: Operations, clocks: Clocks, rate: float, processes: int, whole: float
) -> Speed:
    """The speed that explains a run of `whole` seconds on each of its processes."""
    utilization = dict(ASSUMED)  # of what it did not do, such as sampling what was reused
    for phases, taken in clocks.items():
        at_assumed = sum(operations.steps[phase] / ASSUMED[phase] for phase in phases)
        if taken and at_assumed:
            share = at_assumed / processes / (rate * taken)
            utilization |= {phase: share * ASSUMED[phase] for phase in phases}
    speed = Speed(rate, utilization, 0.0)
    around = sum(Operations({}, operations.around).seconds(speed).values()) / processes
    start = whole - sum(clocks.values()) - around
    return Speed(rate, utilization, max(start, 0.0))
