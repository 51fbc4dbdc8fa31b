"""The settings for life in a group of processes and on a cluster; nothing here imports torch."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from rlhf.config import require_range
from rlhf.errors import ConfigError

Strategy = Literal["none", "ddp", "fsdp", "zero1", "zero2", "zero3"]
Tracker = Literal["none", "tensorboard", "mlflow", "wandb", "trackio"]


class State(Enum):
    """What a training keeps in memory, by what `--sharding` does with it."""

    WEIGHTS = auto()
    GRADIENTS = auto()
    OPTIMIZER = auto()
    ACTIVATIONS = auto()  # and whatever else belongs to a process's own batch: never sharded


SHARDED: dict[Strategy, frozenset[State]] = {
    "none": frozenset(),
    "ddp": frozenset(),
    "zero1": frozenset({State.OPTIMIZER}),
    "zero2": frozenset({State.OPTIMIZER, State.GRADIENTS}),
    "zero3": frozenset({State.OPTIMIZER, State.GRADIENTS, State.WEIGHTS}),
    "fsdp": frozenset({State.OPTIMIZER, State.GRADIENTS, State.WEIGHTS}),
}
BUCKET = 10**7  # gradients that DeepSpeed moves at once


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """How a stage is spread over processes."""

    processes: int = 1
    """Processes to start on this machine, one per GPU; under torchrun, its processes are used."""
    sharding: Strategy = "none"
    """How model state is sharded over processes: ddp (replicated), zero1 (optimizer), zero2 (+
    gradients), zero3 or fsdp (+ weights). none: as `accelerate launch` was configured, else ddp."""
    offload: bool = False
    """Keep sharded state in main memory: slower, room for a larger model."""
    shard_group: int = 0
    """With --sharding fsdp: processes per copy of the model, such as those of one machine; every
    such group holds a whole copy. 0: all processes shard one copy."""
    tensor_parallel: int = 1
    """Split every matrix over this many processes, which must be all of them. Needs a tensor
    parallel plan for the model in transformers. 1: off."""
    stall_timeout: float = 1800.0
    """Seconds without progress after which the run stops (exit code 75) and names the rank that is
    stuck. 0: never."""

    def __post_init__(self) -> None:
        require_range("processes", self.processes, 1)
        require_range("shard_group", self.shard_group, 0)
        require_range("tensor_parallel", self.tensor_parallel, 1)
        require_range("stall_timeout", self.stall_timeout, 0)

    def _require_tensor_parallel(self, **usual: object) -> None:
        """Refuse settings other than `usual` with --tensor-parallel, which excludes them."""
        usual |= {"sharding": "none", "shard_group": 0, "offload": False}
        others = [name for name, value in usual.items() if getattr(self, name) != value]
        if self.tensor_parallel > 1 and others:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in others)
            raise ConfigError(
                f"--tensor-parallel {self.tensor_parallel} does not go with {flags}",
                "Leave one or the other out.",
            )


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(GroupSettings):
    """How a training is spread over processes, saved and watched."""

    save_minutes: float = 0.0
    """Also save a checkpoint every so many minutes. 0: off."""
    max_restarts: int = 0
    """How often to restart from the last checkpoint when a process dies or stalls."""
    preflight: bool = False
    """Test every device and the network before anything is loaded: `rlhf doctor --canary`."""
    track: Tracker = "none"
    """Also send the metrics of every step to this tracker, whose package must be installed."""
    profile: int = 0
    """Steps to profile, starting with the second: a torch trace per rank and a table of phases in
    OUT/profile. 0: off."""
    notify: str = ""
    """URL that gets a JSON object (Slack's form) when the run is done, fails or stalls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("save_minutes", self.save_minutes, 0)
        require_range("max_restarts", self.max_restarts, 0)
        require_range("profile", self.profile, 0)
        if self.notify and not self.notify.startswith(("http://", "https://")):
            raise ConfigError(
                f"--notify is {self.notify!r}", "Give a URL that starts with http:// or https://."
            )
