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
    rubric: Path | None = None
    """A markdown file that says what to judge by; shown beside the work, its version stored."""
    flags: tuple[str, ...] = ("unsafe", "untrue", "off-topic", "broken")
    """What a response can be flagged as."""
    gold_every: int = 20
    """Mix in a gold item, if there are any, once in so many tasks; 0 is never."""
    repeat_every: int = 0
    """Show people something of their own again once in so many tasks; 0 is never."""

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_range("overlap", self.overlap, 1, 100)
        require_range("gold_every", self.gold_every, 0)
        require_range("repeat_every", self.repeat_every, 0)
        if self.annotator is not None and not 0 < len(self.annotator.strip()) <= 100:
            raise ConfigError(f"--annotator is {self.annotator!r}", "Give a name, for example ann.")
        wrong = [flag for flag in self.flags if not 0 < len(flag) <= 40 or "@" in flag]
        if wrong:
            raise ConfigError(
                f"--flags holds {wrong[0]!r}", "Use words of at most 40 characters without @."
            )


def run(settings: Settings) -> dict[str, Any]:
    """Rank responses in the browser: by mouse, touch or keyboard, blind and shuffled."""
    from labeling_app.checks import CheckRates
    from labeling_app.serving import serve

    return serve(
        settings.db,
        host=settings.host,
        port=settings.port,
        annotator=settings.annotator,
        overlap=settings.overlap,
        rubric=settings.rubric,
        flags=settings.flags,
        checks=CheckRates(gold_every=settings.gold_every, repeat_every=settings.repeat_every),
    )
