"""Checks before a training loads anything, for errors that would otherwise appear hours later.

All processes must have the same packages and inputs, see the same folder, and have disk space for
the checkpoints. The hardware canary also multiplies matrices, trains two steps and sums numbers
over all processes, on every device.
"""

import math
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import try_to_load_from_cache
from torch import nn

from rlhf.errors import InputError, InterruptedRunError, MismatchError
from rlhf.parallel.settings import ClusterSettings
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.records.fingerprints import sampled_hash
from rlhf.run.provenance import PACKAGES, package_version
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import beat, watching

GIB = 2**30
INPUT_FILES = tuple(  # of models, ensembles, rankings and reference stores
    f"{folder}{kind}"
    for folder in ("", "member-*/", "outputs/")
    for kind in ("*.safetensors", "*.bin", "*.jsonl", "*.parquet")
)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SAVED_BYTES = 4  # of a weight, float32
STATE_BYTES = 12  # of a trained weight in a checkpoint: itself and Adam's two moments
NETWORK_ELEMENTS = 2**22
SIZE = 256
TOLERANCE = 0.02  # bf16's and TF32's, relative
STALL_SECONDS = 60.0
SHARED_SECONDS = 30.0  # network filesystems show new files late


def check_before_training(
    accelerator: Accelerator,
    settings: ClusterSettings,
    out: Path,
    inputs: dict[str, Any],
    disk_bytes: int,
) -> None:
    """Compare the processes, check the disk space, and run the hardware canary with `--preflight`.

    `disk_bytes` are the bytes of the run's checkpoints and its result.

    Raises:
        MismatchError: a process has other packages or inputs than the first.
        InputError: the disk has no room for the checkpoints, or a device fails.
    """
    require_agreement(accelerator, describe_process(inputs))
    if accelerator.is_main_process:
        require_room(out, disk_bytes)
    if settings.parallel.preflight:
        folder = out.parent / f".{out.name}.canary"
        device = accelerator.device
        # the canary seeds the generators, which must not affect what the run samples
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            findings = run_canary(accelerator, folder)
        accelerator.print(
            f"Hardware canary: {len(findings)} of {len(findings)} devices passed", file=sys.stderr
        )


def describe_process(inputs: dict[str, Any]) -> dict[str, str]:
    """What must be the same in all processes: versions of packages, files of inputs.

    The main process has hashed the inputs for all; whether a machine has other copies of them is
    told from a few kilobytes of each file.
    """
    versions = {f"version of {name}": str(package_version(name)) for name in PACKAGES}
    return versions | {
        f"input {name}": _sample(str(entry["path"])) for name, entry in inputs.items()
    }


def _sample(path: str) -> str:
    """A hash of the files at an input's path on this machine; of a model on the hub its commit."""
    if Path(path).exists():
        return sampled_hash(Path(path), INPUT_FILES)
    cached = try_to_load_from_cache(path, "config.json") if HUB_NAME.fullmatch(path) else None
    return Path(cached).parent.name if isinstance(cached, str) else "not there"


def require_agreement(accelerator: Accelerator, facts: dict[str, str]) -> None:
    """Refuse to start where a process differs from the first; all processes call this.

    Raises:
        MismatchError: names the process, its machine and what is different.
    """
    if accelerator.num_processes == 1:
        return
    everyone = gather_object([(socket.gethostname(), facts)])
    first = everyone[0][1]
    for number, (host, rank_facts) in enumerate(everyone):
        for name in first | rank_facts:
            here, there = rank_facts.get(name, "missing"), first.get(name, "missing")
            if here != there:
                raise MismatchError(
                    f"The processes differ: {name} is {here} on rank {number} ({host}) and "
                    f"{there} on rank 0 ({everyone[0][0]})",
                    "Install the same packages and give the same files on every machine.",
                )


def disk_bytes_of(trained: int, saved: int, checkpoints: int) -> int:
    """Bytes on disk of the kept checkpoints, of one more during writing, and of the result.

    Checkpoints hold the `trained` parameters, the result all `saved` ones.
    """
    return STATE_BYTES * trained * (checkpoints + 1) + SAVED_BYTES * saved


def require_room(out: Path, wanted: int) -> None:
    """Refuse a disk without `wanted` bytes for a run, counting the checkpoints it will replace.

    Raises:
        InputError: names both sizes.
    """
    run = RunDir(out)
    if run.is_done:
        return
    with suppress(FileNotFoundError):  # another process works there, which is reported later
        files = [path for path in run.checkpoints.rglob("*") if path.is_file()]
        wanted -= sum(file.stat().st_size for file in files)
    there = next(folder for folder in (out, *out.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < wanted:
        raise InputError(
            f"{there} has {free / GIB:.1f} GiB free; the checkpoints and the model need about "
            f"{wanted / GIB:.1f} more",
            "Free some, keep fewer states (--checkpoint.keep), or give an --out on another disk.",
        )


def require_shared(run: RunDir) -> None:
    """Refuse a folder that is not shared with the first process's machine.

    Raises:
        InputError: what the first process has written is not there.
    """
    limit = time.monotonic() + SHARED_SECONDS
    while not run.stage_file.is_file():
        if time.monotonic() > limit:
            raise InputError(
                f"{run.path} was made by rank 0, and {socket.gethostname()} does not see it",
                "Give an --out on a filesystem that all machines share.",
            )
        time.sleep(0.2)


def run_canary(accelerator: Accelerator, folder: Path) -> list[dict[str, Any]]:
    """Multiply, train two steps and sum over all processes; returns the findings of each process.

    A process that hangs, also in the first exchange with the others, ends the program.

    Raises:
        MismatchError: a process has other packages than the first.
        InputError: a device multiplies wrongly, or processes end with different weights.
    """

    def report(error: InterruptedRunError) -> None:
        sys.stderr.write(f"error {error.problem}\n")

    with watching(folder, STALL_SECONDS, report):
        beat("comparing packages")
        require_agreement(accelerator, describe_process({}))
        beat("multiplying")
        mine: dict[str, Any] = {"host": socket.gethostname(), "device": _name(accelerator.device)}
        mine["error"] = product_error(accelerator.device)
        beat("training two steps")
        mine["weights"] = train_two_steps(accelerator)
        beat("summing")
        mine["gigabytes_per_second"] = measure_sum(accelerator)
        findings: list[dict[str, Any]] = gather_object([mine])
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    require_passed(findings)
    return findings


def require_passed(findings: list[dict[str, Any]]) -> None:
    """Refuse a group with a broken device.

    Raises:
        InputError: names the rank, its machine and device.
    """
    for number, finding in enumerate(findings):
        where = f"rank {number} ({finding['host']}, {finding['device']})"
        if not finding["error"] <= TOLERANCE:
            raise InputError(
                f"{where} multiplies wrongly: off by {finding['error']:.2g}, at most {TOLERANCE} "
                "is rounding",
                "Exclude this device and have it checked.",
            )
        if finding["weights"] != findings[0]["weights"]:
            raise InputError(
                f"{where} ended two steps with other weights than rank 0",
                "Gradients were not averaged correctly: find the fault by running the canary on "
                "fewer machines, and check that all have the same versions.",
            )


def product_error(device: torch.device) -> float:
    """The largest error of a matrix product on a device, relative to the largest number in it."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, SIZE, SIZE, generator=generator)
    expected = left.double() @ right.double()
    product = (left.to(device) @ right.to(device)).cpu().double()
    return float((product - expected).abs().max() / expected.abs().max())


def train_two_steps(accelerator: Accelerator) -> float:
    """Train a small model for two steps, averaging gradients; returns the norm of its weights."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, 1))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, stepper = prepare(accelerator, plain, optimizer, Sharding("ddp"))
    for step in range(2):
        torch.manual_seed(1 + accelerator.process_index + step * accelerator.num_processes)
        inputs = torch.randn(8, SIZE).to(accelerator.device)
        accelerator.backward(model(inputs).square().mean())
        stepper.step()
        stepper.zero_grad()
    norm = math.sqrt(
        sum(float(value.detach().double().square().sum()) for value in model.parameters())
    )
    accelerator.free_memory()
    return norm


def measure_sum(accelerator: Accelerator) -> float:
    """Gigabytes per second of a sum over all processes, after a warm-up; 0 for one process."""
    if accelerator.num_processes == 1:
        return 0.0
    numbers = torch.ones(NETWORK_ELEMENTS, device=accelerator.device)
    accelerator.reduce(numbers)
    began = time.monotonic()
    total = accelerator.reduce(numbers)
    float(total[0])  # waits for the device
    return numbers.nbytes / (time.monotonic() - began) / 1e9


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
