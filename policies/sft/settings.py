"""The settings of `rlhf sft`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path

from policies.trl_training.settings import TrainerSettings
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SFTSettings(TrainerSettings):
    """Settings of `rlhf sft`."""

    model: str
    """Model folder or hub name to train."""
    demonstrations: Path | None = None
    """Folder written by `rlhf export --format demonstrations`, or JSON Lines with prompt and
    completion, or with messages; "split": "test" marks held-out lines."""
    best_of: Path | None = None
    """Instead of --demonstrations: the --out of `rlhf reference --samples N --reward RM`. Trains on
    each prompt's output with the highest stored reward (best-of-n fine-tuning)."""
    epochs: int = 2
    """Passes over the examples."""
    learning_rate: float = 2e-5
    """Peak learning rate; it falls linearly to 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demonstrations and self.best_of:
            raise ConfigError(
                "--demonstrations and --best-of exclude each other", "Leave one of them out."
            )
        if not (self.demonstrations or self.best_of):
            raise ConfigError(
                "There is nothing to train on: give --demonstrations or --best-of",
                "Add --demonstrations DIR for responses that people wrote, or --best-of REF for "
                "the best reference outputs of `rlhf reference`.",
            )
