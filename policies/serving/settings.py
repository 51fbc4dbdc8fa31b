"""The settings of `rlhf serve --policy`; nothing here imports a web framework."""

from dataclasses import dataclass
from typing import Literal

from rlhf.config import require_range
from rlhf.errors import ConfigError

Engine = Literal["transformers", "vllm"]


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """Which responses, with their prompts, --db keeps so that they can be judged."""

    share: str = "100%"
    """Share of conversations to keep, such as 10%. The others take no feedback."""
    days: int | None = 30
    """Delete kept responses after this many days; those with feedback stay, as training data. none:
    never delete them."""
    redact: str | None = None
    """A function `package.module:function` that receives each text and returns what to keep of it,
    for example without names and numbers."""

    def __post_init__(self) -> None:
        read_share(self.share, "--keep.share")
        require_range("keep.days", self.days, 1)


def read_share(text: str, flag: str) -> float:
    """A share given as 10% or 0.1.

    Raises:
        ConfigError: it is no number, not above 0, or above 1.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{flag} is {text!r}", f"Give a share above 0 and up to 100%: {flag} 10%")
    return share
