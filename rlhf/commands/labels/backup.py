"""`rlhf backup`: copy the label database while people label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to copy where."""

    db: Path
    """The label database."""
    out: Path
    """The file to make; it must not exist."""


def run(settings: Settings) -> dict[str, Any]:
    """Copy the label database as of one moment and check the copy; people may go on labelling."""
    from labeling_app.db.backup import back_up

    return {"out": str(settings.out), "holds": back_up(settings.db, settings.out)}
