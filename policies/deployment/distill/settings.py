"""The settings of `rlhf distill`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path

from policies.trl_training.settings import TrainerSettings
from rlhf.config import require_range

OF_POLICIES = ("on_policy", "divergence", "temperature", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class DistillSettings(TrainerSettings):
    """Settings of `rlhf distill`."""

    teacher: str
    """The policy or reward model to learn from: the --out of its training, or a model folder."""
    student: str
    """The model to train: a model folder or hub name. The student of a policy must have the
    teacher's tokenizer."""
    outputs: Path
    """The --out of `rlhf reference`: prompts with outputs, ideally sampled from the teacher. The
    student of a policy trains on the outputs in part of the batches; that of a reward model learns
    their scores."""
    half: bool = False
    """Start from half of the layers of --student: those that change the hidden states of --outputs
    most (block influence, arXiv 2403.03853)."""
    on_policy: float = 0.5
    """Fraction of the batches in which the student samples responses itself; in the others it
    trains on stored outputs."""
    divergence: float = 0.5
    """Divergence that is minimized over the tokens. 0: the forward KL, which covers everything the
    teacher says. 1: the reverse KL, which avoids what the teacher does not say. In between: a
    Jensen-Shannon divergence."""
    temperature: float | None = None
    """Sampling temperature of the student's responses. Default: that of the outputs. The divergence
    is always computed at temperature 1."""
    max_new_tokens: int | None = None
    """Length limit of the student's responses, in tokens. Default: that of the outputs. With a
    higher limit, a student that does not end its responses outweighs the stored outputs: the loss
    of its batches is divided by the number of stored tokens."""
    batch_size: int = 16
    """Stored outputs per optimizer step, over all processes."""
    micro_batch_size: int = 4
    """Prompts that a process samples or trains on at once."""
    learning_rate: float = 2e-5
    """Peak learning rate; it falls linearly to 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("on_policy", self.on_policy, 0, 1)
        require_range("divergence", self.divergence, 0, 1)
        require_range("temperature", self.temperature, 0, above_low=True)
        require_range("max_new_tokens", self.max_new_tokens, 1)
