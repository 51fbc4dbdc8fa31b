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
    canary: bool = False
    """Multiply, train two steps and add up over all processes, on every device; under a minute."""
    processes: int = 1
    """Processes of the canary on this machine; under torchrun the group that is there is used."""

    def __post_init__(self) -> None:
        require_range("min_memory", self.min_memory, 0)
        require_range("min_disk", self.min_disk, 0)
        require_range("processes", self.processes, 1)


def run(settings: Settings) -> dict[str, Any]:
    """Check Python, packages, devices, memory, disk, SQLite; exit with 2 when one is amiss."""
    from rlhf.parallel.distributed import launch
    from rlhf.parallel.doctor import examine, require_healthy

    if settings.canary:
        launch(settings.processes)
    findings = examine(settings.path, settings.min_memory, settings.min_disk)
    require_healthy(findings)
    found: dict[str, Any] = {finding.what: finding.value for finding in findings}
    return found | (_sing(settings.path) if settings.canary else {})


def _sing(path: Path) -> dict[str, Any]:
    """What the canary found on every device, by rank."""
    from rlhf.parallel.distributed import start
    from rlhf.run.preflight import describe_process, require_agreement, run_canary

    accelerator = start("fp32", seed=0)
    require_agreement(accelerator, describe_process({}))
    findings = run_canary(accelerator, path / ".canary")
    return {
        f"rank {number}": f"{one['host']}, {one['device']}, product off by {one['error']:.1e}, "
        f"sums at {one['gigabytes_per_second']:.2g} GB/s"
        for number, one in enumerate(findings)
    }
