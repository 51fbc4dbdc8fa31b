"""`rlhf label`: rank responses in the browser."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import require_range
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which database to serve, where, and to whom."""

    db: Path
    """The label database."""
    host: str = "127.0.0.1"
    """Address to serve on; other machines reach 0.0.0.0, which needs users: rlhf users add."""
    port: int = 7860
    """Port to serve on."""
    annotator: str | None = None
    """Your name where nobody signs in; the login name when not given."""
    overlap: int = 1
    """How many people rank each task."""

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_range("overlap", self.overlap, 1, 100)
        if self.annotator is not None and not 0 < len(self.annotator.strip()) <= 100:
            raise ConfigError(f"--annotator is {self.annotator!r}", "Give a name, for example ann.")


def run(settings: Settings) -> dict[str, Any]:
    """Rank responses in the browser: by mouse, touch or keyboard, blind and shuffled."""
    from labeling_app.serving import serve

    return serve(
        settings.db,
        host=settings.host,
        port=settings.port,
        annotator=settings.annotator,
        overlap=settings.overlap,
    )
