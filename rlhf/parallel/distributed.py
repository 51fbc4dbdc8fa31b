"""Processes and precision: one Accelerator, sums over ranks, `--processes N` on one machine."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    set_seed,
)
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rlhf.config import MAX_SEED
from rlhf.errors import (
    ConfigError,
    GuardError,
    InputError,
    InterruptedRunError,
    KilledGroupError,
    LostPeerError,
    RlhfError,
)
from rlhf.parallel.waits import waiting
from rlhf.ranks import ATTEMPT, is_main_process, world_size

Value = TypeVar("Value")
_Outcome = tuple[Any, tuple[type[RlhfError], str, str] | None]  # a value, or an error's parts

RANK_SEED_STRIDE = 100_003
SHUTDOWN_SECONDS = "240"  # between SIGTERM and SIGKILL: for the present step and a checkpoint
COLLECTIVE_TIMEOUT = timedelta(hours=24)  # rlhf.run.watchdog reports stalls earlier
SEE_MAIN_PROCESS = "Read its own message for the cause."
PRECISIONS = ("auto", "bf16", "bf16-weights", "fp32")
NO_RESTART_CODES = (InputError.exit_code, GuardError.exit_code)
HOOKS = {
    "no": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "powersgd": DDPCommunicationHookType.POWER_SGD,
}
# torch's defaults are 1000 steps, which few runs here have, and rank 1
POWERSGD = {"start_powerSGD_iter": 10, "matrix_approximation_rank": 4}


def launch(processes: int, max_restarts: int = 0) -> None:
    """Run this command line again in N processes under torchrun's agent, exit with their status.

    Returns at once for a single process without restarts, and inside a group that torchrun or
    accelerate has started.

    Raises:
        InterruptedRunError: this process was asked to stop, or one of the N was killed.
    """
    if (processes == 1 and not max_restarts) or "RANK" in os.environ:
        return
    command = [sys.executable, "-m", "rlhf.cli", *sys.argv[1:]]
    sys.exit(run_with_restarts(command, processes, max_restarts))


def run_with_restarts(command: list[str], processes: int, max_restarts: int) -> int:
    """Run a group, restart it after failures that were not deliberate, and return its exit code.

    A restarted process resumes from the last checkpoint.

    Raises:
        InterruptedRunError: this process was asked to stop, or the last attempt was killed.
    """
    attempt = 0
    while True:
        os.environ[ATTEMPT] = str(attempt)
        try:
            code = run_processes(command, processes)
            if attempt == max_restarts or code in (0, *NO_RESTART_CODES):
                return code
            failure = f"The group ended with exit code {code}"
        except KilledGroupError as error:
            if attempt == max_restarts:
                raise
            failure = error.problem
        attempt += 1
        message = f"{failure}; restart {attempt} of {max_restarts} from the last checkpoint\n"
        sys.stderr.write(message)


def run_processes(command: list[str], processes: int) -> int:
    """Run a command N times as one group on this machine and return the group's exit code.

    Raises:
        InterruptedRunError: this process was asked to stop, or one of the N was killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
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
    # the processes and the errors below report the same more clearly
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
    """The exit code of the process that failed first; deliberate exit codes take precedence."""
    codes = [failure.exitcode for failure in error.failures.values()]
    killed = [item for item in error.failures.items() if item[1].exitcode == -signal.SIGKILL]
    rank, first = killed[0] if killed else error.get_first_failure()
    stalled = InterruptedRunError.exit_code
    deliberate = [code for code in (*NO_RESTART_CODES, stalled) if code in codes]
    if not deliberate and first.exitcode < 0:
        raise KilledGroupError(
            f"Process {rank} was killed by {signal.Signals(-first.exitcode).name}",
            "If memory ran out, use smaller batches; then run the same command with --resume.",
        ) from None
    return int(deliberate[0] if deliberate else first.exitcode)


def start(precision: str, seed: int, comm_hook: str = "no") -> Accelerator:
    """Join the process group, choose device and precision, and seed every rank differently.

    `seed` is that of process 0; `comm_hook` is one of HOOKS.

    Raises:
        ConfigError: the precision is unknown, or the hook does not run on this device.
    """
    if comm_hook == "bf16" and not torch.cuda.is_available():
        raise ConfigError(
            "--ddp-comm-hook bf16 needs NCCL, and there is no CUDA device here",
            "Use fp16 or powersgd.",
        )
    parallel = DistributedDataParallelKwargs(
        comm_hook=HOOKS[comm_hook],
        comm_state_option=POWERSGD if comm_hook == "powersgd" else {},
        gradient_as_bucket_view=True,  # else DDP holds every gradient twice
    )
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it guesses
    # without `cpu` accelerate would not join a group on a machine that has no GPU
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=choose_precision(precision),
        kwargs_handlers=[parallel, InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    seed_all(seed + RANK_SEED_STRIDE * accelerator.process_index)
    return accelerator


def extend_timeouts() -> None:
    """Let all groups of this process wait as long as the first; call it after a library adds some.

    Theirs end after ten minutes with NCCL: before `--parallel.stall-timeout`, and without saying
    which rank is stuck.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)  # fake
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)


def seed_all(seed: int) -> None:
    """Seed every generator, modulo 2³²: NumPy takes 32 bits."""
    set_seed(seed % (MAX_SEED + 1))


def start_alone(precision: str, seed: int) -> Accelerator:
    """`start`, for commands that only one process can run.

    Raises:
        ConfigError: torchrun or accelerate has started several.
    """
    if world_size() > 1:
        raise ConfigError(
            f"{world_size()} processes were started for a command that runs in one process",
            "Start it by itself, without torchrun or accelerate.",
        )
    return start(precision, seed)


def device_bytes(processes: int) -> float:
    """Memory of this process's device: the GPU's, or a part of main memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local


def precision_of(accelerator: Accelerator) -> Literal["bf16", "fp32"]:
    """The precision in which an accelerator multiplies."""
    return "bf16" if accelerator.mixed_precision == "bf16" else "fp32"


def choose_precision(precision: str) -> str:
    """Accelerate's name for a precision.

    `auto` is bf16 autocast where the hardware multiplies bf16, else fp32. Beside bf16 weights, what
    is float32, such as a reward model, is multiplied under autocast, too.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision is {precision!r}", f"Use one of {', '.join(PRECISIONS)}.")
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16() else "fp32"
    return "bf16" if precision.startswith("bf16") else "no"


def _multiplies_bf16() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported())


def from_main(value: Value) -> Value:
    """The main process's value on every rank, as each may see a shared disk differently."""
    with waiting("ranks"):
        values: list[Value] = broadcast_object_list([value])
    return values[0]


def on_main(work: Callable[[], Value]) -> Value:
    """Do some work in the main process alone, and return what it gives in every process.

    All processes of the group, which has been formed, call this; what it gives is pickled. In every
    process it raises the error that the work raises; of one without a message for the user the
    other processes learn that the main one has failed.

    Raises:
        RlhfError: as `work`.
        LostPeerError: in the other processes, where `work` raised any other error.
    """
    if world_size() == 1:
        return work()
    if not is_main_process():
        received: Value = _outcome_of(from_main(None))
        return received
    outcome: _Outcome = (None, (LostPeerError, "The main process has failed", SEE_MAIN_PROCESS))
    try:
        value = work()
        outcome = (value, None)
    except RlhfError as error:
        outcome = (None, (type(error), error.problem, error.remedy))
        raise
    finally:
        from_main(outcome)
    return value


def _outcome_of(outcome: Any) -> Any:
    """Return the main process's value, or raise its error."""
    value, failure = outcome
    if failure:
        kind, problem, remedy = failure
        raise kind(problem, remedy)
    return value


def global_max(accelerator: Accelerator, value: float) -> float:
    """The largest of all ranks' values."""
    mine = torch.tensor([value], dtype=torch.float64, device=accelerator.device)
    with waiting("ranks"):
        return float(accelerator.gather(mine).max())


def global_sum(accelerator: Accelerator, value: Tensor | float) -> Tensor:
    """The sum of a number or tensor over all ranks, in float64."""
    tensor = torch.as_tensor(value, dtype=torch.float64, device=accelerator.device)
    with waiting("ranks"):
        summed: Tensor = accelerator.reduce(tensor, reduction="sum")
    return summed


def global_sum_dict(
    accelerator: Accelerator, values: Mapping[str, Tensor | float]
) -> dict[str, float]:
    """The sums of several numbers over all ranks, by their names, in float64 and one collective."""
    device = accelerator.device
    numbers = [
        torch.as_tensor(value, dtype=torch.float64, device=device) for value in values.values()
    ]
    return dict(zip(values, global_sum(accelerator, torch.stack(numbers)).tolist(), strict=True))
