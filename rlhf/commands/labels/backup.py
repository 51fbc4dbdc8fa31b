"""`rlhf backup`: copy the label database while people label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.commands.wording import listed
from rlhf.records.wording import counted

EXAMPLE = "rlhf backup --db labels.db --out backups/monday.db"
HELD = ("prompts", "responses", "rankings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to copy where."""

    db: Path
    """The label database."""
    out: Path
    """File to write; it must not exist yet."""


def run(settings: Settings) -> dict[str, Any]:
    """Copy a consistent snapshot of the label database and check it; people can keep labeling."""
    from labeling_app.db.files.backup import back_up

    return {"out": str(settings.out), "holds": back_up(settings.db, settings.out)}


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """Where the copy is and what it holds."""
    kinds = [counted(result["holds"].get(name, 0), name[:-1]) for name in HELD]
    return (
        f"Copied {settings.db} to {result['out']} and checked the copy: {listed(kinds)}.\n"
        "It holds password hashes and the cookie key: keep it as safe as the original."
    )
