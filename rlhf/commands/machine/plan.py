"""`rlhf plan`: which ways of training a model fit on a machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from rlhf.commands.idle_settings import refuse_idle
from rlhf.config import require_range
from rlhf.errors import ConfigError
from rlhf.parallel.settings import ReduceDtype
from rlhf.planning.plan import GIB, STAGES, Pass
from rlhf.records.wording import counted

if TYPE_CHECKING:
    from rlhf.planning.planner import Shape
    from rlhf.planning.strategies import Load

EXAMPLE = "rlhf plan --model models/SmolLM2-135M-Instruct --gpus 8 --gpu-memory 24"
TRAININGS = ("reward", "ppo")
NAME_WIDTH = 17  # of "FSDP bf16-weights"
COMMANDS = {
    "reward": "train-reward --rankings RANKINGS --model {model} --out REWARD",
    "reference": "reference --prompts RANKINGS --model {model} --reward REWARD --out REFERENCE",
    "ppo": "ppo --model {model} --reward REWARD --reference REFERENCE --out POLICY",
}

FIRST_ROW = 4  # of the table, after two sentences, an empty line and its head
LIGHTER = "+ fits with fewer sequences in a pass or, in training, --batch.gradient-checkpointing."
LAST_WAY = {"generate": "vLLM for PPO's sampling", "vllm": "a vLLM that more GPUs share"}

FORECASTING = ("like", "utilization", "sampling_utilization", "amount")

GPU_MEMORY = 80.0  # GiB
# The speeds are of large matrix products in dense bf16, as measured: 271 of an A100 SXM and 253 of
# a PCIe one, 760 to 795 of an H100 SXM in the best of many shapes, 790 of an H200.
NO_FORECAST = (
    "No hours and no price: {reason}. Give --tflops, the speed of one GPU in large matrix products "
    "in bf16 (about 700 for an H100 SXM or H200, about 250 for an A100), or --like RUN, a short "
    "run on such GPUs."
)

Table = dict[str, dict[str, float]]  # by option and stage


@dataclass(frozen=True, kw_only=True)
class AmountSettings:
    """Size of the runs that are forecast. Default: that of the runs in --like."""

    prompts: int | None = None
    """Prompts to train on. Without --like: 1000."""
    held_out: int | None = None
    """Test prompts. Without --like: 100."""
    responses: float | None = None
    """train-reward: ranked responses per prompt. Without --like: 4."""
    pairs: float | None = None
    """dpo: pairs per prompt. Default: as in --like, else all pairs of --amount.responses (four
    responses give six pairs)."""
    samples: int | None = None
    """reference, distill: responses sampled per prompt. Without --like: 1."""
    prompt_tokens: float | None = None
    """Mean tokens of a prompt. Without --like: 128."""
    response_tokens: float | None = None
    """Mean tokens of a response. Without --like: 128."""
    epochs: float | None = None
    """train-reward, sft, dpo, distill: passes over the prompts. Without --like: 1."""
    steps: int | None = None
    """ppo: steps. Without --like: 100."""
    episodes: int | None = None
    """ppo: responses sampled per step. Without --like: 64."""
    updates: int | None = None
    """ppo: passes over the responses of a step. Without --like: 1."""
    on_policy: float | None = None
    """distill: fraction of the batches in which the student samples. Without --like: 0.5."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low = 0 if name in ("held_out", "epochs", "pairs", "on_policy") else 1
            require_range(f"amount.{name}", value, low)
        require_range("amount.on_policy", self.on_policy, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model and the machine."""

    ZERO_IS_NONE: ClassVar[frozenset[str]] = frozenset({"shard_group", "tflops", "network"})

    model: str
    """Model folder or hub name. Only config.json is read, so a folder with just that file will do,
    such as examples/six_billion/llama_6b."""
    student: str | None = None
    """distill: model folder or hub name of the student; the teacher is --model. Default: half the
    layers of --model."""
    gpus: int | None = None
    """Number of devices, over all machines. Default: 1."""
    shard_group: int | None = None
    """FSDP: number of devices that share one sharded copy; default: all."""
    tensor_parallel: int = 1
    """Also show a reward model split by tensor parallelism over this many processes; 1: off."""
    gpu_memory: float | None = None
    """Memory of each device, in GiB; a tenth is kept free for what the plan does not count.
    Default: 80."""
    sequence_length: int = 1024
    """Tokens of a prompt with its response."""
    batch: int = 8
    """Sequences per forward pass of a device. ppo: the policy also reads half as many reference
    outputs, for the KL term (--kl.rows-per-prompt 0.5)."""
    gradient_checkpointing: bool = False
    """Plan for recomputing activations in the backward pass: less memory, more time."""
    passes: int = 1
    """Forward and backward passes per optimizer step of a device."""
    reduce_dtype: ReduceDtype = "fp32"
    """Precision in which gradients are sent, as set by --parallel.reduce-dtype of the training
    commands. bf16 changes the rows of DDP, FSDP and LoRA."""
    tflops: float | None = None
    """Measured speed of a device, in 10¹² operations per second; with --network, shows times. With
    --price-per-hour: the speed of a large matrix product in bf16, about 700 for an H100 SXM or H200
    and 250 for an A100; default: as in --like, else measured here. With --gpus or --gpu-memory, a
    machine without a GPU measures nothing."""
    network: float | None = None
    """Measured bandwidth from a device to the others, in GB/s; with --tflops, shows times."""
    lora_rank: int = 16
    """Rank of the adapters in the LoRA row (train-reward --adapter lora, ppo --lora.share-base)."""
    engine: Literal["generate", "vllm"] = "generate"
    """Sampling engine for PPO and reference outputs. With `vllm` under FSDP, no device ever holds a
    whole model."""
    engine_tensor_parallel: int = 1
    """With --engine vllm: number of devices that share one vLLM, at most those of one machine."""
    price_per_hour: float | None = None
    """Price per device-hour, in any currency: forecasts the hours and price of each stage."""
    like: Annotated[tuple[Path, ...], Parameter(negative="")] = ()
    """With --price-per-hour: finished short runs, at most one each of train-reward, reference, ppo,
    sft, dpo and distill. Their stages are forecast at their measured speed, and all stages at their
    size unless --amount changes it."""
    utilization: float | None = None
    """With --price-per-hour: fraction of --tflops that forward and backward passes reach. Default:
    as in --like, else 0.3."""
    sampling_utilization: float | None = None
    """With --price-per-hour: fraction of --tflops that sampling reaches. Default: as in --like,
    else 0.03."""
    amount: AmountSettings = field(default_factory=AmountSettings)
    """Size of the runs whose price is forecast."""

    def __post_init__(self) -> None:
        require_range("gpus", self.gpus, 1)
        require_range("gpu_memory", self.gpu_memory, 0, above_low=True)
        require_range("sequence_length", self.sequence_length, 2)
        require_range("batch", self.batch, 1)
        require_range("shard_group", self.shard_group, 1)
        if self.shard_group and self.devices % self.shard_group:
            raise ConfigError(
                f"--shard-group {self.shard_group} does not divide --gpus {self.devices}",
                "Give the devices of one machine, or another divisor of all.",
            )
        require_range("tflops", self.tflops, 0, above_low=True)
        require_range("network", self.network, 0, above_low=True)
        require_range("tensor_parallel", self.tensor_parallel, 1)
        require_range("passes", self.passes, 1)
        if self.reduce_dtype != "fp32" and self.devices == 1:
            raise ConfigError(
                f"--reduce-dtype {self.reduce_dtype} has no effect with --gpus 1, which adds up "
                "nothing with others",
                "Give more --gpus, or leave it out.",
            )
        require_range("price_per_hour", self.price_per_hour, 0)
        require_range("utilization", self.utilization, 0, 1, above_low=True)
        require_range("sampling_utilization", self.sampling_utilization, 0, 1, above_low=True)
        if self.network is None and self.tflops and self.price_per_hour is None:
            refuse_idle(self, ["tflops"], "without --network or --price-per-hour")
        if self.tflops is None:
            refuse_idle(self, ["network"], "without --tflops")
        if self.price_per_hour is None:
            refuse_idle(self, FORECASTING, "without --price-per-hour")
        require_range("lora_rank", self.lora_rank, 1)
        require_range("engine_tensor_parallel", self.engine_tensor_parallel, 1)
        if self.engine_tensor_parallel > 1 and self.engine != "vllm":
            raise ConfigError(
                f"--engine-tensor-parallel {self.engine_tensor_parallel} does nothing with "
                f"--engine {self.engine}",
                "Add --engine vllm, or leave it out.",
            )
        if self.devices % self.engine_tensor_parallel:
            raise ConfigError(
                f"--engine-tensor-parallel {self.engine_tensor_parallel} does not divide --gpus "
                f"{self.devices}",
                "Give the devices of one machine, or another divisor of all.",
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.gpus or 1

    @property
    def usable_gib(self) -> float:
        """Memory of each device without what is kept free, in GiB."""
        from rlhf.planning.strategies import USABLE

        return (self.gpu_memory or GPU_MEMORY) * USABLE

    @property
    def is_for_gpus(self) -> bool:
        """Whether the plan is for GPUs that were named, not for this machine."""
        return self.gpus is not None or self.gpu_memory is not None

    @property
    def vllm_processes(self) -> int:
        """Processes that share a vLLM; 0 where another engine samples."""
        return self.engine_tensor_parallel if self.engine == "vllm" else 0

    def load(self) -> "Load":
        """What each device computes."""
        from rlhf.planning.strategies import Load

        return Load(
            self.sequence_length,
            self.batch,
            self.gradient_checkpointing,
            self.lora_rank,
            self.shard_group,
            self.vllm_processes,
            reduce_dtype=self.reduce_dtype,
        )


def run(settings: Settings) -> dict[str, Any]:
    """Show each stage's memory and traffic per device and, with --price-per-hour, its price."""
    from rlhf.commands.machine.forecasting import forecasts
    from rlhf.planning.advice import advice_for_all, tensor_parallel_advice
    from rlhf.planning.planner import read_shape
    from rlhf.planning.strategies import Option, options_for, stage_bytes
    from rlhf.planning.traffic import Speed, step_bytes, step_seconds
    from rlhf.planning.training_plan import fine_tuning_plans

    shape, student = read_shape(settings.model), read_student(settings)
    load = settings.load()
    usable, passes, gpus = settings.usable_gib, settings.passes, settings.devices

    def table(stages: Sequence[str], number: Callable[[str, Option], float]) -> Table:
        """A number of each stage under each option."""
        return {
            option.name: {stage: round(number(stage, option), 3) for stage in stages}
            for option in options_for(gpus)
        }

    def held(variant: "Load") -> Table:
        return table(STAGES, lambda stage, o: stage_bytes(stage, o, shape, variant, gpus) / GIB)

    needs, least = held(load), held(replace(load, checkpointing=True, batch=1))
    sent = table(
        TRAININGS, lambda stage, option: step_bytes(stage, option, shape, load, passes, gpus) / GIB
    )
    seconds: Table = {}
    if settings.tflops and settings.network:
        speed = Speed(settings.tflops, settings.network)
        seconds = table(
            TRAININGS,
            lambda stage, option: step_seconds(stage, option, shape, load, passes, gpus, speed),
        )
    advice = advice_for_all(shape, load, gpus, usable * GIB)
    hints = [stage_advice.sentence for stage_advice in advice.values()]
    if settings.tensor_parallel > 1:
        hints.append(tensor_parallel_advice(shape, load, passes, settings.tensor_parallel))
    one_pass = Pass(load.batch * load.length, load.length, load.checkpointing)
    rank, price = load.lora_rank, settings.price_per_hour
    tuning = fine_tuning_plans(shape, student, one_pass, bf16=True, processes=gpus, lora_rank=rank)
    return {
        "parameters": shape.parameters,
        "forecast": None if price is None else forecasts(settings, shape, student, price),
        "gib": needs,
        "fits": _at_most(usable, needs),
        "fits_lighter": _at_most(usable, least),
        "fine_tuning_gib": {name: round(plan.peak / GIB, 3) for name, plan in tuning.items()},
        "sent_gib": sent,
        "seconds": seconds,
        "advice": hints,
        "ppo_phases_gib": {
            phase: round(size / GIB, 3) for phase, size in advice["ppo"].phases.items()
        },
        "commands": {
            stage: command(stage, settings.model, stage_advice.flags, stage_advice.processes)
            for stage, stage_advice in advice.items()
            if stage_advice.flags is not None
        },
    }


def _at_most(limit: float, table: Table) -> dict[str, dict[str, bool]]:
    return {name: {s: gib <= limit for s, gib in row.items()} for name, row in table.items()}


def read_student(settings: Settings) -> "Shape":
    """The shape of what distillation trains, by default that of half the layers."""
    from policies.deployment.distill.student import half_config
    from rlhf.modeling.models import load_config
    from rlhf.planning.planner import read_shape, shape_of

    if settings.student is not None:
        return read_shape(settings.student)
    return shape_of(half_config(load_config(settings.model)), settings.model)


def command(stage: str, model: str, flags: Sequence[str], processes: int) -> str:
    """A command to type: on several machines the same on each, with at most eight devices."""
    from rlhf.planning.advice import GPUS_PER_MACHINE, gpus_per_machine

    arguments = f"{COMMANDS[stage].format(model=model)} {' '.join(flags)}".strip()
    if processes == 1:
        return f"rlhf {arguments}"
    if processes <= GPUS_PER_MACHINE:
        return f"rlhf {arguments} --processes {processes}"
    each = gpus_per_machine(processes)
    return (
        f"torchrun --nnodes {processes // each} --nproc-per-node {each} --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29501 -m rlhf.cli {arguments}"
    )


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """The result as a table; a star marks what fits."""
    from rlhf.commands.machine.forecasting import forecast_lines

    lines = [
        f"{result['parameters']:,} parameters. GiB on each device; * fits, with a tenth kept free.",
        f"A forward pass: {counted(settings.batch, 'sequence')} of {settings.sequence_length:,} "
        f"tokens, {'with' if settings.gradient_checkpointing else 'without'} gradient "
        "checkpointing.",
        "",
        " " * NAME_WIDTH + "".join(f"{stage:>12}" for stage in STAGES),
    ]
    for name, row in result["gib"].items():
        marks = {
            stage: "*" if fits else "+" if result["fits_lighter"][name][stage] else " "
            for stage, fits in result["fits"][name].items()
        }
        cells = "".join(f"{row[s]:>11,.2f}{marks[s]}" for s in STAGES)
        lines.append(f"{name:{NAME_WIDTH}}{cells}".rstrip())
    if any("+" in line for line in lines[FIRST_ROW:]):
        lines.append(LIGHTER)
    usable = settings.usable_gib
    needs = result["fine_tuning_gib"].items()
    tuning = ", ".join(f"{n} {gib:,.2f}{'*' if gib <= usable else ''}" for n, gib in needs)
    lines += ["", f"Fine-tuning, which shards nothing: {tuning}."]
    if any(value for row in result["sent_gib"].values() for value in row.values()):
        lines += ["", "GiB that each device sends in one step."]
        lines += _rows(result["sent_gib"])
    if result["seconds"]:
        lines += ["", "Seconds of one step without sampling: computation, then communication."]
        lines += _rows(result["seconds"])
    if result["forecast"]:
        lines += ["", *forecast_lines(settings, result["forecast"])]
    elif settings.price_per_hour is not None:
        reason = "a run in --like had no GPU" if settings.like else "this machine has no GPU"
        lines += ["", NO_FORECAST.format(reason=reason)]
    last = LAST_WAY[settings.engine]
    lines += [
        "",
        f"Recommended (all weights if they fit; if not, adapters; if not, {last}):",
        *(f"  {hint}" for hint in result["advice"]),
    ]
    if result["ppo_phases_gib"]:
        lines += ["", "PPO as recommended, GiB in each phase:"]
        lines += [f"  {size:>8,.2f}  {phase}" for phase, size in result["ppo_phases_gib"].items()]
    if result["commands"]:
        lines += ["", "Commands (replace the names in capitals with your folders):"]
        lines += [f"  {line}" for line in result["commands"].values()]
    return "\n".join(lines)


def _rows(table: Table) -> list[str]:
    head = " " * NAME_WIDTH + "".join(f"{stage:>12}" for stage in TRAININGS)
    return [
        head,
        *(
            f"{name:{NAME_WIDTH}}" + "".join(f"{row[stage]:>12,.2f}" for stage in TRAININGS)
            for name, row in table.items()
        ),
    ]
