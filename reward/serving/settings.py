"""The settings of `rlhf serve`; nothing here imports torch."""

from dataclasses import dataclass, field
from pathlib import Path

from reward.settings import Combine, require_choice
from rlhf.config import Precision, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Which reward model to serve, and where."""

    reward: str
    """A reward model or an ensemble. Functions and addresses need no server: give them to
    --reward of the other commands."""
    host: str = "127.0.0.1"
    """Address to serve on. 0.0.0.0 lets other machines connect, without authentication."""
    port: int = 8001
    """Port to serve on."""
    combine: Combine = "mean"
    """The reward of an ensemble: the mean of its members' rewards, or the worst of them."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a reward model that records none, e.g.
    '{"enable_thinking": false}'."""
    micro_tokens: int = 4096
    """Tokens in one forward pass; affects speed and memory only."""
    max_queue: int = 4096
    """Responses that may wait at the same time. Requests beyond that are answered with status 503,
    and clients ask again."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_range("micro_tokens", self.micro_tokens, 1)
        require_range("max_queue", self.max_queue, 1)
        require_choice("precision", self.precision, Precision)
        require_choice("combine", self.combine, Combine)
        if ":" in self.reward and not Path(self.reward).exists():
            raise ConfigError(
                f"--reward is {self.reward!r}, and only reward models are served",
                "Give the folder of a reward model; functions and addresses can be given to "
                "--reward of the other commands as they are.",
            )
