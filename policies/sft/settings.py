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
    """Folder that `rlhf export --format demonstrations` wrote, or JSON Lines: prompt + completion,
    or messages, and perhaps "split": "test" for what is held out."""
    best_of: Path | None = None
    """In place of --demonstrations: the --out of `rlhf reference --samples N --reward RM`. Train on
    the output of each prompt that has the highest stored reward (best-of-n fine-tuning)."""
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
