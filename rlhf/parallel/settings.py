"""Settings of stages that run in several processes, and on clusters; nothing here imports torch."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Literal

from rlhf.config import TrainingPrecision, require_range
from rlhf.config.paths import flag_of, read_setting
from rlhf.errors import ConfigError
from rlhf.ranks import world_size

Strategy = Literal["auto", "ddp", "fsdp", "zero1", "zero2", "zero3"]
ReduceDtype = Literal["fp32", "bf16"]
Tracker = Literal["none", "tensorboard", "mlflow", "wandb", "trackio"]


class MemoryKind(Enum):
    """What a training keeps in memory, by what `--sharding` does with it."""

    WEIGHTS = auto()
    GRADIENTS = auto()
    OPTIMIZER = auto()
    COPIES = auto()  # of weights in bf16, kept by autocast; none where weights are sharded
    ACTIVATIONS = auto()  # and whatever else belongs to a process's own batch: never sharded


SHARDED: dict[Strategy, frozenset[MemoryKind]] = {
    "auto": frozenset(),
    "ddp": frozenset(),
    "zero1": frozenset({MemoryKind.OPTIMIZER}),
    "zero2": frozenset({MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS}),
    "zero3": frozenset({MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS, MemoryKind.WEIGHTS}),
    "fsdp": frozenset({MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS, MemoryKind.WEIGHTS}),
}
BUCKET = 10**7  # gradients that DeepSpeed moves at once


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saved states that a run resumes from."""

    every: int | None = 25
    """Steps (of --steps) between checkpoints. none: no checkpoints by step count."""
    every_minutes: float | None = None
    """Also save a checkpoint every N minutes."""
    keep: int = 1
    """Checkpoints kept on disk."""
    asynchronous: bool = False
    """Write checkpoints in the background while training continues, from a copy of weights and
    optimizer state. The copy takes 12 bytes of main memory per trained parameter: of all parameters
    in every process or, with --sharding fsdp, of the process's shard. Cannot be combined with
    DeepSpeed (zero1 to zero3)."""

    def __post_init__(self) -> None:
        require_range("checkpoint.every", self.every, 1)
        require_range("checkpoint.every_minutes", self.every_minutes, 0, above_low=True)
        require_range("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """What processes share and what happens when one of them is stuck."""

    offload: bool = False
    """Keep sharded state in CPU memory: slower, but fits a larger model."""
    shard_group: int | None = None
    """With --sharding fsdp: shard within groups of this many processes, such as the GPUs of one
    machine, and replicate across groups. Default: all processes shard one copy."""
    tensor_parallel: int = 1
    """Tensor parallelism: split each weight matrix over this many processes, which must be all of
    them. Needs a tensor parallel plan for the model in transformers. 1: off."""
    stall_timeout: float | None = 1800.0
    """Stop the run (exit code 75) after this many seconds without progress, and name the rank that
    is stuck. none: never."""

    def __post_init__(self) -> None:
        require_range("parallel.tensor_parallel", self.tensor_parallel, 1)
        require_range("parallel.shard_group", self.shard_group, 1)
        require_range("parallel.stall_timeout", self.stall_timeout, 0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class TrainingParallelSettings(ParallelSettings):
    """What processes share, and what happens when one of them dies or is stuck."""

    max_restarts: int = 0
    """Maximum number of automatic restarts from the last checkpoint when a process dies or
    stalls."""
    reduce_dtype: ReduceDtype = "fp32"
    """Precision in which gradients are sent and summed over processes, with --sharding ddp or fsdp.
    bf16: half the bytes, rounded to 8 significant bits; micro-batches are still summed in
    float32."""
    preflight: bool = False
    """Test every device and the network before anything is loaded, as `rlhf doctor --canary`
    does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("parallel.max_restarts", self.max_restarts, 0)


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """How a stage is spread over processes."""

    OLD_NAMES: ClassVar[dict[str, str]] = {
        "offload": "parallel.offload",
        "shard_group": "parallel.shard_group",
        "tensor_parallel": "parallel.tensor_parallel",
        "stall_timeout": "parallel.stall_timeout",
    }
    OLD_VALUES: ClassVar[dict[str, dict[str, str]]] = {"sharding": {"none": "auto"}}
    ZERO_IS_NONE: ClassVar[frozenset[str]] = frozenset(
        {"parallel.shard_group", "parallel.stall_timeout"}
    )

    processes: int = 1
    """Number of processes (GPUs) on this machine. Ignored under torchrun, which starts them."""
    sharding: Strategy = "auto"
    """What is sharded over processes. ddp: nothing, each holds a copy. zero1: optimizer state.
    zero2: gradients, too. zero3, fsdp: weights, too. auto: as `accelerate launch` was configured,
    otherwise ddp."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    """What processes share."""
    price_per_hour: float | None = None
    """Price per device-hour, in any currency; adds the run's cost to the report. Each process
    counts as one device. Default: report device-hours only."""

    def __post_init__(self) -> None:
        require_range("processes", self.processes, 1)
        require_range("price_per_hour", self.price_per_hour, 0)

    def _require_engine_groups(self, tensor_parallel: int) -> None:
        """Refuse groups of processes, with an engine each, that do not divide all processes."""
        processes = max(self.processes, world_size())
        if processes % tensor_parallel:
            raise ConfigError(
                f"{processes} processes do not divide into groups of "
                f"--sampling.engine-tensor-parallel {tensor_parallel}",
                "Give a divisor of the number of processes.",
            )

    def _require_tensor_parallel(self, **usual: object) -> None:
        """Refuse settings other than `usual` with tensor parallelism, which excludes them."""
        usual |= {"sharding": "auto", "parallel.shard_group": None, "parallel.offload": False}
        others = [name for name, value in usual.items() if read_setting(self, name) != value]
        if self.parallel.tensor_parallel > 1 and others:
            raise ConfigError(
                f"--parallel.tensor-parallel {self.parallel.tensor_parallel} cannot be combined "
                f"with {' and '.join(map(flag_of, others))}",
                "Leave one or the other out.",
            )


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(GroupSettings):
    """How a training is spread over processes and watched."""

    OLD_NAMES: ClassVar[dict[str, str]] = {
        **GroupSettings.OLD_NAMES,
        "max_restarts": "parallel.max_restarts",
        "preflight": "parallel.preflight",
        "save_minutes": "checkpoint.every_minutes",
    }
    ZERO_IS_NONE: ClassVar[frozenset[str]] = GroupSettings.ZERO_IS_NONE | {
        "checkpoint.every_minutes",
        "profile",
    }

    parallel: TrainingParallelSettings = field(default_factory=TrainingParallelSettings)
    """What processes share."""
    track: Tracker = "none"
    """Also send each step's metrics to this tracker, whose package must be installed."""
    profile: int | None = None
    """Profile this many steps, starting with the second: a torch trace per rank and a table of
    phases in OUT/profile."""
    notify: str | None = None
    """Webhook URL that receives a JSON message (Slack's format) when the run is done, fails or
    stalls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("profile", self.profile, 1)
        if self.notify and not self.notify.startswith(("http://", "https://")):
            raise ConfigError(
                f"--notify is {self.notify!r}", "Give a URL that starts with http:// or https://."
            )

    def _require_bf16_weights_fit(self, precision: TrainingPrecision, **usual: object) -> None:
        """Refuse settings other than `usual` with bf16 weights, which exclude them.

        Adapters are float32 beside frozen weights, DeepSpeed would round heads, and gradients that
        are bf16 need no compression.
        """
        if precision != "bf16-weights":
            return
        usual |= {"parallel.tensor_parallel": 1}
        if self.sharding.startswith("zero"):
            usual["sharding"] = "fsdp"
        others = [name for name, value in usual.items() if read_setting(self, name) != value]
        if others:
            raise ConfigError(
                "--precision bf16-weights cannot be combined with "
                + " and ".join(f"{flag_of(name)} {read_setting(self, name)}" for name in others),
                "Use --precision bf16, or train all weights with --sharding ddp or fsdp.",
            )
