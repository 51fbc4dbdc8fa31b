"""`rlhf doctor`: checks this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.commands.wording import columns
from rlhf.config import require_range

EXAMPLE = "rlhf doctor --canary --processes 2"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much memory and disk the work needs, and whether to test the devices."""

    path: Path = Path()
    """Folder whose disk is checked."""
    min_memory: float = 4.0
    """Main memory to require, in GiB."""
    min_disk: float = 5.0
    """Free disk space to require, in GiB."""
    canary: bool = False
    """Test every device: multiply matrices, train two steps and sum over all processes. Takes less
    than a minute."""
    processes: int = 1
    """With --canary: number of processes (GPUs) on this machine. Ignored under torchrun, which
    starts them."""

    def __post_init__(self) -> None:
        require_range("min_memory", self.min_memory, 0)
        require_range("min_disk", self.min_disk, 0)
        require_range("processes", self.processes, 1)


def run(settings: Settings) -> dict[str, Any]:
    """Check Python, packages, devices, memory, disk and SQLite; exit code 2 if a check fails."""
    from rlhf.parallel.distributed import launch
    from rlhf.parallel.doctor import examine, require_healthy
    from rlhf.run.provenance import IMAGE

    if settings.canary:
        launch(settings.processes)
    findings = examine(settings.path, settings.min_memory, settings.min_disk)
    require_healthy(findings)
    values: dict[str, Any] = {finding.what: finding.value for finding in findings}
    values |= {"image": os.environ[IMAGE]} if IMAGE in os.environ else {}
    return values | (_canary(settings.path) if settings.canary else {})


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """The findings as columns; anything insufficient is an error."""
    tested = " Every device passed the hardware canary." if settings.canary else ""
    return f"{columns(result)}\n\nThis machine is ready.{tested}"


def _canary(path: Path) -> dict[str, Any]:
    """The canary's findings on every device, by rank."""
    from rlhf.parallel.distributed import start
    from rlhf.run.preflight import run_canary

    findings = run_canary(start("fp32", seed=0), path / ".canary")
    return {
        f"rank {number}": f"{finding['host']}, {finding['device']}, "
        f"product off by {finding['error']:.1e}, sums at {finding['gigabytes_per_second']:.2g} GB/s"
        for number, finding in enumerate(findings)
    }
