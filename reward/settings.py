"""The settings of `rlhf train-reward`; nothing here imports torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from rlhf.config import require_range
from rlhf.errors import ConfigError

Loss = Literal["bradley_terry", "plackett_luce", "regression"]


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Which rankings, which model, and how to train."""

    rankings: Path
    """Folder that `rlhf export --format ranked` wrote."""
    model: str
    """Model folder or hub name that gets a scalar head."""
    out: Path
    """Folder for the trained reward model, its metrics and its report."""
    resume: bool = False
    """Go on with the run in --out."""
    seed: int = 0
    """Seed of the new head and of the order of prompts."""
    processes: int = 1
    """Processes on this machine; under torchrun the group that is there is used."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 is autocast over float32 weights; auto takes it where the hardware multiplies bf16."""
    head: Literal["random", "fitted"] = "random"
    """How the fresh head starts: at random, or fitted to the rankings on frozen features."""
    epochs: int = 1
    """Passes over the prompts; two over-fit; with --head fitted, 0 trains only the head."""
    prompts_per_batch: int = 16
    """Prompts per optimizer step, over all processes; a prompt brings all its pairs."""
    tokens_per_batch: int = 2048
    """Tokens in one forward pass; changes speed and memory, not the result."""
    share_prompt: bool = True
    """Encode a prompt once for all its responses; off where the model's attention forbids it."""
    learning_rate: float = 2e-5
    """Peak learning rate, annealed to 0; 5e-5 for small models to 9e-6 for 6B."""
    warmup_fraction: float = 0.05
    """Part of the steps in which the learning rate rises from 0."""
    max_length: int = 2048
    """Longest prompt + response in tokens."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What to do beyond --max-length: refuse, or drop the oldest turns of the prompt."""
    loss: Loss = "bradley_terry"
    """All pairs; or whole rankings; or squared distance to the rank, scaled to -1 ... 1."""
    margin: float = 0.0
    """Reward difference that bradley_terry asks for, per step of a ranking's strength."""
    centring: float = 0.0
    """Weight of a penalty on the squared sum of a pair's rewards; 0.01 keeps them near 0."""
    annotator_weights: dict[str, float] = field(default_factory=dict)
    """How much an annotator counts, for example --annotator-weights.ann 0.5; others count 1."""
    held_out_fraction: float = 0.1
    """Part of the prompts held out for measuring, when the export has no test prompts."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""
    save_every: int = 50
    """Optimizer steps between checkpoints; 0 for none."""
    keep_checkpoints: int = 1
    """Checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        require_range("processes", self.processes, 1)
        require_range("epochs", self.epochs, 0 if self.head == "fitted" else 1)
        require_range("prompts_per_batch", self.prompts_per_batch, 1)
        require_range("tokens_per_batch", self.tokens_per_batch, 1)
        require_range("learning_rate", self.learning_rate, 0, 1, above_low=True)
        require_range("warmup_fraction", self.warmup_fraction, 0, 1)
        require_range("max_length", self.max_length, 2)
        require_range("margin", self.margin, 0)
        require_range("held_out_fraction", self.held_out_fraction, 0, 0.5, above_low=True)
        require_range("save_every", self.save_every, 0)
        require_range("keep_checkpoints", self.keep_checkpoints, 1)
        require_range("centring", self.centring, 0)
        for name, weight in self.annotator_weights.items():
            require_range(f"annotator_weights.{name}", weight, 0)
        if self.loss not in get_args(Loss):
            raise ConfigError(
                f"--loss is {self.loss!r}", f"Use one of {', '.join(get_args(Loss))}."
            )
        if self.margin and self.loss != "bradley_terry":
            raise ConfigError(
                f"--margin {self.margin:g} has no meaning for --loss {self.loss}",
                "Leave it out, or use --loss bradley_terry.",
            )
        if self.precision not in ("auto", "bf16", "fp32"):
            raise ConfigError(f"--precision is {self.precision!r}", "Use auto, bf16 or fp32.")
        if self.too_long not in ("refuse", "truncate"):
            raise ConfigError(f"--too-long is {self.too_long!r}", "Use refuse or truncate.")


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Which responses to score, and by what."""

    # Not keyword-only: the file is given without a flag.
    file: Annotated[Path, Parameter(name="--file")] = field(kw_only=False)
    """JSON Lines: prompt (or messages) with response (or responses), or lines of an export."""
    reward: str
    """A reward model, signal:package.module:function, or an http(s):// endpoint."""
    out: Path
    """JSON Lines with the rewards added."""
    tokens_per_batch: int = 4096
    """Tokens in one forward pass of a reward model."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 is autocast over float32 weights; auto takes it where the hardware multiplies bf16."""

    def __post_init__(self) -> None:
        require_range("tokens_per_batch", self.tokens_per_batch, 1)
        if self.precision not in ("auto", "bf16", "fp32"):
            raise ConfigError(f"--precision is {self.precision!r}", "Use auto, bf16 or fp32.")
