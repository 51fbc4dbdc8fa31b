"""`rlhf doctor`: whether this machine can do the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import require_range


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where the work will happen, and how much room it needs."""

    path: Path = Path()
    """Folder whose disk must have room."""
    min_memory: float = 4.0
    """GiB of main memory that must be free."""
    min_disk: float = 5.0
    """GiB of disk that must be free."""

    def __post_init__(self) -> None:
        require_range("min_memory", self.min_memory, 0)
        require_range("min_disk", self.min_disk, 0)


def run(settings: Settings) -> dict[str, Any]:
    """Check Python, packages, devices, memory, disk, SQLite; exit with 2 when one is amiss."""
    from rlhf.doctor import examine, require_healthy

    findings = examine(settings.path, settings.min_memory, settings.min_disk)
    require_healthy(findings)
    return {finding.what: finding.value for finding in findings}
