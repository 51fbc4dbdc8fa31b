"""How `rlhf serve` scores responses; nothing here imports torch."""

from dataclasses import dataclass

from reward.settings import Combine, require_choice
from rlhf.config import Precision, require_range


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """How the reward model scores."""

    combine: Combine = "mean"
    """The reward of an ensemble: the mean or the lowest (`worst`) of its members' rewards."""
    micro_tokens: int = 4096
    """Tokens per forward pass; affects speed and memory only."""
    max_queue: int = 4096
    """Maximum number of responses waiting to be scored. Further requests get status 503, and
    clients retry."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        require_range("scoring.micro_tokens", self.micro_tokens, 1)
        require_range("scoring.max_queue", self.max_queue, 1)
        require_choice("scoring.precision", self.precision, Precision)
        require_choice("scoring.combine", self.combine, Combine)
