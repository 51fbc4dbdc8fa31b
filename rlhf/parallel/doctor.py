"""Checks of this machine: Python, packages, device, memory, disk, SQLite."""

import os
import platform
import shutil
import sqlite3
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlhf.errors import InputError
from rlhf.parallel.distributed import choose_precision

GIB = 2**30
OLDEST_SQLITE = (3, 35, 0)  # RETURNING


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` says how to fix it, empty when nothing is wrong."""

    what: str
    value: str
    remedy: str = ""


def examine(path: Path, min_memory_gib: float, min_disk_gib: float) -> list[Finding]:
    """Check everything that a stage needs from this machine, and the disk of the folder `path`."""
    free_disk = shutil.disk_usage(path.resolve()).free / GIB
    return [
        python(sys.version_info[:3], str(metadata("rlhf")["Requires-Python"])),
        *packages(requires("rlhf") or []),
        device(),
        Finding("precision", "bf16" if choose_precision("auto") == "bf16" else "fp32"),
        Finding("processors", str(os.cpu_count())),
        room("free memory", free_memory_gib(), min_memory_gib, "Close other programs."),
        room("free disk", free_disk, min_disk_gib, "Free some, or give another --path."),
        sqlite(sqlite3.sqlite_version_info),
    ]


def require_healthy(findings: list[Finding]) -> None:
    """Refuse a machine on which something is missing or too small.

    Raises:
        InputError: lists every finding that has a remedy.
    """
    faults = [finding for finding in findings if finding.remedy]
    if faults:
        raise InputError(
            "This machine is not ready: "
            + "; ".join(f"{finding.what} is {finding.value}" for finding in faults),
            "\n  ".join(dict.fromkeys(finding.remedy for finding in faults)),
        )


def python(running: tuple[int, ...], wanted: str) -> Finding:
    """The version of Python against the range that the package requires."""
    value = ".".join(map(str, running))
    fits = SpecifierSet(wanted).contains(value)
    return Finding("Python", value, "" if fits else f"Install Python {wanted}.")


def packages(wanted: list[str]) -> list[Finding]:
    """Every package that is needed without extras, against its range."""
    needed = [Requirement(text) for text in wanted]
    return [
        _package(requirement)
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate()
    ]


def _package(wanted: Requirement) -> Finding:
    install = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        value = version(wanted.name)
    except PackageNotFoundError:
        return Finding(wanted.name, "missing", install)
    fits = wanted.specifier.contains(value, prereleases=True)
    return Finding(wanted.name, value, "" if fits else install)


def device() -> Finding:
    """The GPUs that torch sees, or the processor; a GPU that torch cannot use has a remedy."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("device", ", ".join(names))
    if shutil.which("nvidia-smi") is not None:
        remedy = "Install torch for your CUDA version: pip install --force-reinstall torch"
        return Finding("device", "a GPU that torch cannot use", remedy)
    return Finding("device", f"CPU ({platform.machine()})")


def free_memory_gib() -> float:
    """GiB of main memory that programs can still get."""
    file = Path("/proc/meminfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def room(resource: str, have_gib: float, want_gib: float, remedy: str) -> Finding:
    """Free space against the required space."""
    enough = have_gib >= want_gib
    hint = (
        ""
        if enough
        else f"{want_gib:g} GiB of {resource.removeprefix('free ')} are required: {remedy}"
    )
    return Finding(resource, f"{have_gib:.1f} GiB", hint)


def sqlite(running: tuple[int, ...]) -> Finding:
    """The version of SQLite under the label database."""
    value, oldest = (".".join(map(str, numbers)) for numbers in (running, OLDEST_SQLITE))
    remedy = f"Use a Python that is built with SQLite {oldest} or newer."
    return Finding("SQLite", value, "" if running >= OLDEST_SQLITE else remedy)
