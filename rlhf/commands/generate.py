"""`rlhf generate`: sample responses for the prompts that lack them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rlhf.config import require_range


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which model answers, how often, and how it samples."""

    db: Path
    """The label database."""
    model: str
    """Model folder or hub name."""
    k: Annotated[int, Parameter(name=("--k", "-k"))] = 4
    """Responses per prompt."""

    def __post_init__(self) -> None:
        require_range("k", self.k, 1)


def run(settings: Settings) -> dict[str, Any]:
    """Sample responses for prompts that lack them."""
    return {"responses": 0}
