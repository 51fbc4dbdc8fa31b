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
    """Processes on this machine; under torchrun the group that is there is used."""
    sharding: Strategy = "none"
    """What processes divide: nothing (ddp), all (fsdp, zero3), less (zero1, zero2); none: ask
    accelerate's configuration."""
    offload: bool = False
    """Keep what --sharding divides in main memory: slower, room for a larger model."""
    shard_group: int = 0
    """With --sharding fsdp: processes that divide one copy, such as those of a machine; the other
    groups hold copies of it. 0: all divide one."""
    tensor_parallel: int = 1
    """Processes, all there are, that hold one model together, a part of every matrix each; where
    transformers has a plan for the model."""
    stall_timeout: float = 1800.0
    """Seconds without progress after which the run ends with 75 and says which rank is stuck; 0:
    never."""

    def __post_init__(self) -> None:
        require_range("processes", self.processes, 1)
        require_range("shard_group", self.shard_group, 0)
        require_range("tensor_parallel", self.tensor_parallel, 1)
        require_range("stall_timeout", self.stall_timeout, 0)

    def _require_tensor_parallel(self, **usual: object) -> None:
        """Refuse what models held together do not do: settings that are not as `usual`."""
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
    """Minutes between checkpoints, besides --save-every; 0 for none."""
    max_restarts: int = 0
    """Start again from the last checkpoint so many times when a process dies or stalls."""
    preflight: bool = False
    """Before anything is loaded, test every device and the network: rlhf doctor's canary."""
    track: Tracker = "none"
    """Send the metrics of every step to a tracker besides metrics.jsonl; its package is needed."""
    profile: int = 0
    """Steps to profile, from the second on: a torch trace of every rank and a table of phases in
    OUT/profile; 0 for none."""
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
