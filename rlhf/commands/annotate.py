"""`rlhf annotate`: rankings by a function, kept apart from people's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import require_range
from rlhf.errors import ConfigError

SIGNAL = "signal:"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who annotates, and when two responses tie."""

    db: Path
    """The label database."""
    annotator: str
    """signal:package.module:function; it gets the prompt's and the response's text."""
    tie_within: float = 0.0
    """Responses whose scores differ by no more than this tie."""

    def __post_init__(self) -> None:
        require_range("tie_within", self.tie_within, 0)
        if not self.annotator.startswith(SIGNAL):
            raise ConfigError(
                f"--annotator is {self.annotator!r}",
                "Write signal:package.module:function, for example signal:my_rules:score",
            )


def run(settings: Settings) -> dict[str, Any]:
    """Rank the responses in the database by a function; its rankings never pass for human."""
    from labeling_app.annotating import annotate_with_signal
    from labeling_app.store import Store
    from rlhf.signals import load_signal

    signal = load_signal(settings.annotator.removeprefix(SIGNAL))
    with Store(settings.db, must_exist=True) as store:
        counts = annotate_with_signal(store, settings.annotator, signal, settings.tie_within)
    return {"annotator": settings.annotator, "kind": "signal", **counts}
