"""`rlhf label`: rank responses in the browser."""

import getpass
from dataclasses import dataclass, field
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
    """Address to serve on."""
    port: int = 7860
    """Port to serve on."""
    annotator: str = field(default_factory=getpass.getuser)
    """Your name as annotator; the login name when not given."""
    overlap: int = 1
    """How many people rank each task."""

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_range("overlap", self.overlap, 1, 100)
        if not self.annotator.strip() or len(self.annotator) > 100:
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
