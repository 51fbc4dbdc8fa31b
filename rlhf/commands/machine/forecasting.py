"""The forecast of `rlhf plan --price-per-hour`: hours and price of each stage, and its lines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlhf.commands.machine.plan import Settings
from rlhf.errors import InputError
from rlhf.planning.forecast import (
    ASSUMED,
    TITLES,
    Amount,
    Phase,
    Phases,
    Speed,
    Stage,
    assumed_start,
    count_operations,
    forecast,
)
from rlhf.planning.planner import Shape
from rlhf.planning.price import amount as shown
from rlhf.planning.trial import Trial, read_trial
from rlhf.run.rundir import RunDir

# the same stage with all weights and with adapters, whose speeds are close
OTHER_WEIGHTS: dict[Stage, Stage] = {
    "reward": "reward_lora",
    "reward_lora": "reward",
    "ppo": "ppo_lora",
    "ppo_lora": "ppo",
    "dpo": "dpo_lora",
    "dpo_lora": "dpo",
}


# What a run tells of the other stages, which read the same prompts; a later line
# overrules an earlier one. Demonstrations, and the outputs of a teacher, are other texts.
SHARED: dict[Stage, tuple[str, ...]] = {
    **dict.fromkeys(
        ("dpo_lora", "dpo"), ("prompts", "held_out", "prompt_tokens", "response_tokens")
    ),
    **dict.fromkeys(
        ("ppo_lora", "ppo"), ("prompts", "held_out", "samples", "prompt_tokens", "response_tokens")
    ),
    **dict.fromkeys(
        ("reward_lora", "reward"),
        ("prompts", "held_out", "responses", "prompt_tokens", "response_tokens"),
    ),
    "reference": ("prompts", "held_out", "samples", "prompt_tokens", "response_tokens"),
}


def forecasts(
    settings: Settings, shape: Shape, student: Shape, price_per_hour: float
) -> dict[str, Any] | None:
    """Forecasts of the time and cost of each stage, with what they assume.

    None where the plan is for GPUs whose speed nobody has measured.

    Raises:
        InputError: a run in --like cannot be used.
    """
    trials = _trials(settings)
    known = _rate(settings, list(trials.values()))
    if known is None:
        return None
    rate, source = known
    common = Amount()
    for stage, names in SHARED.items():
        if trial := trials.get(stage):
            common = common.changed({name: trial.reported.get(name) for name in names})
    by_stage: dict[str, Any] = {}
    for stage in TITLES:
        nearest = trials.get(stage) or trials.get(OTHER_WEIGHTS.get(stage, stage))
        amount = common.changed(nearest.reported if nearest else {})
        amount = amount.changed(asdict(settings.amount))
        operations = count_operations(stage, shape, amount, settings.lora_rank, student)
        speed = _speed(settings, stage, shape, rate, nearest)
        prediction = forecast(operations, speed, settings.devices, price_per_hour)
        by_stage[stage] = {
            **asdict(prediction),
            "amount": asdict(amount),
            "utilization": {phase: speed.utilization[phase] for phase in prediction.seconds},
            "assumed": _assumed(settings, prediction.seconds, nearest),
            "like": nearest.path if nearest else None,
            "like_stage": nearest.stage if nearest else None,
        }
    return {"stages": by_stage, "matmul_tflops": rate / 1e12, "tflops_from": source}


def _trials(settings: Settings) -> dict[Stage, Trial]:
    """The runs in --like by their stage, one for each."""
    trials: dict[Stage, Trial] = {}
    for path in settings.like:
        trial = read_trial(RunDir(path))
        if earlier := trials.get(trial.stage):
            raise InputError(
                f"{earlier.path} and {trial.path} are both runs of {TITLES[trial.stage]}",
                "Give one --like for each stage.",
            )
        trials[trial.stage] = trial
    return trials


def _rate(settings: Settings, trials: Sequence[Trial]) -> tuple[float, str] | None:
    """Operations a second of a matrix product, and where the number is from.

    None where that of a GPU is asked for, and neither this machine nor a run has measured one.
    """
    if settings.tflops is not None:
        return settings.tflops * 1e12, "as given by --tflops"
    if settings.is_for_gpus and any(trial.without_gpu for trial in trials):
        return None
    if trials:
        return trials[0].speed.rate, f"measured by {trials[0].path}"
    import torch

    from rlhf.parallel.distributed import choose_precision
    from rlhf.planning.utilization import matmul_rate

    if settings.is_for_gpus and not torch.cuda.is_available():
        return None
    dtype = torch.bfloat16 if choose_precision("auto") == "bf16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return matmul_rate(device, dtype), "measured here"


def _speed(
    settings: Settings, stage: Stage, shape: Shape, rate: float, trial: Trial | None
) -> Speed:
    """The speed of a stage: that of its trial, else assumed; what was given comes first."""
    utilization: Phases = dict(trial.speed.utilization if trial else ASSUMED)
    if settings.utilization is not None:
        utilization |= {"scoring": settings.utilization, "training": settings.utilization}
    if settings.sampling_utilization is not None:
        utilization |= {"sampling": settings.sampling_utilization}
    start = assumed_start(stage, shape)
    if trial:
        start = trial.speed.start * shape.parameters / trial.parameters
        # its utilization is of the rate that it measured itself
        rate = trial.speed.rate if settings.tflops is None else rate
    return Speed(rate, utilization, start)


def _assumed(settings: Settings, phases: Iterable[Phase], trial: Trial | None) -> list[Phase]:
    """The phases whose utilization is neither measured nor given."""
    given = {
        "sampling": settings.sampling_utilization,
        "scoring": settings.utilization,
        "training": settings.utilization,
    }
    unknown = trial.assumed if trial else tuple(given)
    return [phase for phase in phases if phase in unknown and given[phase] is None]


def forecast_lines(settings: Settings, forecast: dict[str, Any]) -> Iterator[str]:
    """Hours and price of each stage, and what they assume."""
    stages = forecast["stages"]
    yield "Forecast of what each stage takes, on all devices together, and costs:"
    yield f"  {'':20}{'device-hours':>14}{'hours':>10}{'price':>10}  for"
    for name, stage in stages.items():
        numbers = (shown(stage["device_hours"]), shown(stage["hours"]), shown(stage["price"]))
        cells = f"{numbers[0]:>14}{numbers[1]:>10}{numbers[2]:>10}"
        yield f"  {TITLES[name]:20}{cells}  {_size(name, stage['amount'])}"
    yield (
        f"  A device multiplies large matrices at {shown(forecast['matmul_tflops'])} TFLOP/s "
        f"({forecast['tflops_from']}), and of this uses:"
    )
    for name, stage in stages.items():
        skipped = stage["assumed"] if stage["like"] else []
        uses = (
            f"{phase} {use:.1%}"
            + (f" (assumed: that run did no {phase})" if phase in skipped else "")
            for phase, use in stage["utilization"].items()
        )
        source = f"like {stage['like']}" if stage["like"] else "assumed where not given"
        if stage["like"] and stage["like_stage"] != name:
            source += f", a run of {TITLES[stage['like_stage']]}"
        start = f"{shown(stage['start_seconds'])} s to load and save models"
        yield f"    {TITLES[name]:20}{', '.join(uses)}; {start} ({source})"
    yield "  Devices divide the work without loss; reward model and critic have the model's size."
    if not all(stage["like"] for stage in stages.values()):
        yield (
            "  Sizes and lengths under “for” are assumed unless --amount.* gives them; memory is "
            "planned for --sequence-length."
        )
        yield "  For a closer forecast make a short run of each stage and name it: --like RUN."


def _size(stage: Stage, amount: dict[str, Any]) -> str:
    """How much of what a forecast is for."""
    response = f"{amount['response_tokens']:.0f} tokens"
    prompt = f"of {amount['prompt_tokens']:.0f} tokens"
    if stage.startswith("ppo"):
        return f"{amount['steps']:,} steps of {amount['episodes']} responses of {response}"
    if stage == "reference":
        count = amount["samples"] * (amount["prompts"] + amount["held_out"])
        return f"{count:,} responses of {response} to prompts {prompt}"
    times, count = f"{amount['epochs']:.3g} ×", f"{amount['prompts']:,}"
    if stage == "sft":
        return f"{times} {count} demonstrations of {response} to prompts {prompt}"
    if stage.startswith("dpo"):
        pairs = Amount(**amount).pairs_per_prompt
        return f"{times} {count} prompts {prompt} with {pairs:.3g} pairs of responses of {response}"
    if stage == "distill":
        outputs = f"{amount['samples'] * amount['prompts']:,} outputs of {response}"
        return f"{times} {outputs}, {amount['on_policy']:.0%} of them the student's"
    return (
        f"{times} {count} prompts {prompt} with {amount['responses']:.3g} responses of {response}"
    )
