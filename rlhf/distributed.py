"""Processes and precision: one Accelerator, sums over ranks, and `--processes N` on this machine."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rlhf.errors import ConfigError

RANK_SEED_STRIDE = 100_003
PRECISIONS = ("auto", "bf16", "fp32")


def launch(processes: int) -> None:
    """Run this very command line again in N processes under torchrun's agent, then exit with their status.

    Returns at once when one process is wanted, or inside a group that torchrun or accelerate has started.
    """
    if processes == 1 or "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="rlhf",
        max_restarts=0,
        start_method="spawn",
    )
    command = [sys.executable, "-m", "rlhf.cli", *sys.argv[1:]]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    sys.exit(0)


def is_main_process() -> bool:
    """True in the one process that talks to the user; callable before the group exists."""
    return os.environ.get("RANK", "0") == "0"


def start(precision: str, seed: int) -> Accelerator:
    """Join the process group that is there, choose device and precision, seed every rank differently.

    Raises:
        ConfigError: the precision is unknown.
    """
    accelerator = Accelerator(mixed_precision=choose_precision(precision))
    set_seed(seed + RANK_SEED_STRIDE * accelerator.process_index)
    return accelerator


def choose_precision(precision: str) -> str:
    """Accelerate's name for a precision; `auto` is bf16 autocast where the hardware multiplies bf16, else fp32.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision is {precision!r}", f"Use one of {', '.join(PRECISIONS)}.")
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16() else "fp32"
    return "bf16" if precision == "bf16" else "no"


def _multiplies_bf16() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported())


def global_sum(accelerator: Accelerator, value: Tensor | float) -> Tensor:
    """The sum of a number or tensor over all ranks, in float64."""
    tensor = torch.as_tensor(value, dtype=torch.float64, device=accelerator.device)
    summed: Tensor = accelerator.reduce(tensor, reduction="sum")
    return summed
