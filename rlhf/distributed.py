"""Processes and precision: one Accelerator, sums over ranks, `--processes N` on one machine."""

import logging
import os
import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rlhf.errors import ConfigError, GuardError, InputError, InterruptedRunError

RANK_SEED_STRIDE = 100_003
PRECISIONS = ("auto", "bf16", "fp32")
DELIBERATE = (InputError.exit_code, GuardError.exit_code)


def launch(processes: int) -> None:
    """Run this command line again in N processes under torchrun's agent, exit with their status.

    Returns at once when one process is wanted, or inside a group that torchrun or accelerate has
    started.

    Raises:
        InterruptedRunError: this process was asked to stop, or one of the N was killed.
    """
    if processes == 1 or "RANK" in os.environ:
        return
    sys.exit(run_processes([sys.executable, "-m", "rlhf.cli", *sys.argv[1:]], processes))


def run_processes(command: list[str], processes: int) -> int:
    """Run a command N times as one group on this machine and return the group's exit code.

    Raises:
        InterruptedRunError: this process was asked to stop, or one of the N was killed.
    """
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
    # what it would log, the processes and the errors below say better
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException:
        raise InterruptedRunError(
            "The processes were stopped", "Run the same command with --resume to go on."
        ) from None
    except ChildFailedError as error:
        return _exit_code(error)
    return 0


def _exit_code(error: ChildFailedError) -> int:
    """The exit code of the process that failed first; what a process said on purpose goes first."""
    codes = [failure.exitcode for failure in error.failures.values()]
    rank, first = error.get_first_failure()
    deliberate = [code for code in codes if code in DELIBERATE]
    if not deliberate and first.exitcode < 0:
        raise InterruptedRunError(
            f"Process {rank} was killed by {signal.Signals(-first.exitcode).name}",
            "When memory ran out, use smaller batches; then run the same command with --resume.",
        ) from None
    return int(deliberate[0] if deliberate else first.exitcode)


def start(precision: str, seed: int) -> Accelerator:
    """Join the group that is there, choose device and precision, seed every rank differently.

    Raises:
        ConfigError: the precision is unknown.
    """
    # without `cpu` accelerate would not join a group on a machine that has no GPU
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision=choose_precision(precision)
    )
    set_seed(seed + RANK_SEED_STRIDE * accelerator.process_index)
    return accelerator


def choose_precision(precision: str) -> str:
    """Accelerate's name for a precision.

    `auto` is bf16 autocast where the hardware multiplies bf16, else fp32.

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
