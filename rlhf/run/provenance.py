"""Where a result comes from: versions, code, machine, command line."""

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from rlhf.ranks import world_size

PACKAGES = (
    "rlhf",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "numpy",
    "peft",
    "trl",
)
CODE = Path(__file__).parents[1]
NVIDIA = Path("/proc/driver/nvidia/version")
IMAGE = "RLHF_IMAGE"  # a container cannot see its own digest: whoever starts it says so


def describe_environment() -> dict[str, Any]:
    """What stage.json keeps of the code, the packages, the machine and the command line."""
    diff = code_diff()
    torch: Any = sys.modules.get("torch")  # loaded by every stage that computes
    return {
        "versions": {name: package_version(name) for name in PACKAGES},
        "git_commit": _git("describe", "--always", "--dirty"),
        "code_diff": hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None,
        "command": _command(),
        "processes": world_size(),
        "hardware": {
            "host": socket.gethostname(),
            "machine": platform.machine(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "cuda": torch and torch.version.cuda,
            "gpus": torch
            and [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
            "driver": driver_version(NVIDIA),
            "nccl": nccl_version(torch),
            "image": os.environ.get(IMAGE),
        },
    }


def driver_version(path: Path) -> str | None:
    """The version of NVIDIA's kernel module, from the file in /proc; None without one."""
    try:
        match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[0] if match else None


def nccl_version(torch: Any) -> str | None:
    """The version that torch was built with; None without CUDA."""
    if torch is None or not torch.version.cuda:
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


@cache
def all_packages() -> str:
    """Every installed package with its version, as pip reads them."""
    read = [package.metadata for package in distributions()]  # `version` would read the file again
    lines = {f"{metadata['Name']}=={metadata['Version']}" for metadata in read}
    return "\n".join(sorted(lines, key=str.lower)) + "\n"


def package_version(package: str) -> str | None:
    """The installed version of a package; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def code_diff() -> str:
    """The difference of the code from its commit; empty without one, or outside a checkout."""
    return _git("diff", "HEAD") or ""


def _command() -> list[str]:
    """The command line without the address of --notify, which would let readers post there."""
    arguments = list(sys.argv)
    for index, argument in enumerate(arguments):
        if argument.startswith("--notify="):
            arguments[index] = "--notify=…"
        elif argument == "--notify" and index + 1 < len(arguments):
            arguments[index + 1] = "…"
    return arguments


def _git(*arguments: str) -> str | None:
    """Git's output; None without git, or if no checkout tracks this code."""
    try:
        tracked = ["git", "-C", str(CODE), "ls-files", "--error-unmatch", __file__]
        if subprocess.run(tracked, capture_output=True, check=False).returncode:
            return None
        given = ["git", "-C", str(CODE), *arguments]
        done = subprocess.run(given, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    # a file may have another encoding; the last line of a difference may be blank
    return done.stdout.decode(errors="replace").removesuffix("\n") or None
