"""How `rlhf serve` scores responses; nothing here imports torch."""

from dataclasses import dataclass

from reward.settings import Combine, require_choice
from rlhf.config import Precision, require_range


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """How the reward model scores."""

    combine: Combine = "mean"
    """The reward of an ensemble: the mean of its members' rewards, or the worst of them."""
    micro_tokens: int = 4096
    """Tokens in one forward pass; affects speed and memory only."""
    max_queue: int = 4096
    """Responses that may wait at the same time. Requests beyond that are answered with status 503,
    and clients ask again."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        require_range("scoring.micro_tokens", self.micro_tokens, 1)
        require_range("scoring.max_queue", self.max_queue, 1)
        require_choice("scoring.precision", self.precision, Precision)
        require_choice("scoring.combine", self.combine, Combine)
