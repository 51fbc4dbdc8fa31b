"""Settings that `rlhf sft`, `dpo` and `distill` share; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path

from rlhf.config import MAX_SEED, Precision, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of a training with one of trl's trainers."""

    out: Path
    """Folder of the run: the trained model, checkpoints, metrics and report."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template, e.g. '{"enable_thinking": false}'; later stages reuse
    them."""
    resume: bool = False
    """Continue an unfinished run in --out."""
    seed: int = 0
    """Random seed of the order of examples."""
    processes: int = 1
    """Number of processes (GPUs) on this machine. Ignored under torchrun, which starts them."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""
    epochs: int = 1
    """Passes over the examples."""
    batch_size: int = 16
    """Examples (demonstrations or pairs) per optimizer step, over all processes."""
    micro_batch_size: int = 4
    """Examples per forward pass of a process; affects speed and memory only."""
    learning_rate: float = 1e-6
    """Peak learning rate; it falls linearly to 0."""
    warmup_fraction: float = 0.05
    """Fraction of the steps during which the learning rate rises from 0."""
    max_length: int = 2048
    """Maximum tokens of a prompt with its response; a longer example is an error."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""
    save_every: int = 50
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 1
    """Checkpoints kept on disk."""
    price_per_hour: float | None = None
    """Price per device-hour, in any currency; adds the run's cost to the report. Each process
    counts as one device. Default: report device-hours only."""

    def __post_init__(self) -> None:
        require_range("price_per_hour", self.price_per_hour, 0)
        require_range("processes", self.processes, 1)
        require_range("epochs", self.epochs, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("batch_size", self.batch_size, 1)
        require_range("micro_batch_size", self.micro_batch_size, 1)
        require_range("learning_rate", self.learning_rate, 0, 1, above_low=True)
        require_range("warmup_fraction", self.warmup_fraction, 0, 1)
        require_range("max_length", self.max_length, 2)
        require_range("save_every", self.save_every, 1)
        require_range("keep_checkpoints", self.keep_checkpoints, 1)
        if self.batch_size % self.micro_batch_size:
            raise ConfigError(
                f"--batch-size is {self.batch_size}, no multiple of --micro-batch-size "
                f"{self.micro_batch_size}",
                "Choose a micro batch that divides the batch.",
            )
