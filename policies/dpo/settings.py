"""The settings of `rlhf dpo`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from policies.trl_training.settings import TrainerSettings
from rlhf.config import require_range


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters instead of all weights."""

    rank: int | None = None
    """Train a LoRA adapter of this rank instead of all weights. Default: all weights."""

    def __post_init__(self) -> None:
        require_range("lora.rank", self.rank, 1)


@dataclass(frozen=True, kw_only=True)
class DPOSettings(TrainerSettings):
    """Settings of `rlhf dpo`."""

    ZERO_IS_NONE: ClassVar[frozenset[str]] = frozenset({"lora.rank"})

    model: str
    """Model folder or hub name to train."""
    rankings: Path
    """Folder written by `rlhf export --format ranked`."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO. `ipo`: squared error of the difference in log-ratio per token against
    1/(2·beta), so that pairs are not pushed apart without limit."""
    beta: float = 0.1
    """How strongly the policy is kept close to the original model; a larger value keeps it
    closer."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """LoRA adapters instead of all weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("beta", self.beta, 0, above_low=True)
