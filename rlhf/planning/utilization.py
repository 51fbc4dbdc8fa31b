"""How well a training uses its device: operations a second, against those of a plain product.

    utilization = operations of all models / (seconds · rate of a large matrix product)

The rate is measured on this device, in the training's precision, when a run begins.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from rlhf.parallel.distributed import global_sum
from rlhf.parallel.waits import Cause, take_waits
from rlhf.planning.flops import FlopCount, take_flops
from rlhf.records.jsonl import write_json

TERA = 1e12
SIZES = {"cuda": 8192, "cpu": 1024}  # of the square matrices; smaller ones are slower
MEASURED_SECONDS = 0.3
LEAST_TIMES = 3
NOTABLE_WAIT = 0.2  # of the time
LOW_UTILIZATION = 0.1
PROFILING = "--profile 3"
SHORT_PASS = 512  # tokens; with fewer, calls and weights take most of the time
WAITS: tuple[Cause, ...] = ("data", "ranks")
LACKING: dict[Cause, tuple[str, str]] = {
    "data": (
        "preparing batches",
        "more processes prepare them at once (--processes), as does a faster CPU",
    ),
    "ranks": (
        "waiting for other processes",
        "larger batches divide more evenly, and fewer processes wait less for the network",
    ),
}


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product of random square matrices, the fastest of some.

    It is measured once in a process.
    """
    size = SIZES.get(device.type, SIZES["cpu"])
    generator = torch.Generator(device).manual_seed(0)  # the training's own stays as it is
    left, right = (
        torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2)
    )

    def seconds() -> float:
        began = time.perf_counter()
        left @ right
        _synchronize(device)
        return time.perf_counter() - began

    first = seconds()
    if device.type == "cpu" and first > MEASURED_SECONDS:  # bf16 that the processor lacks
        return 2 * size**3 / first
    taken: list[float] = []
    while sum(taken) < MEASURED_SECONDS or len(taken) < LEAST_TIMES:
        taken.append(seconds())
    return 2 * size**3 / min(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_rate(accelerator: Accelerator, path: Path) -> float:
    """`matmul_rate` in the precision of a training: the mean of all processes, measured at once.

    The main process writes it to `path`.
    """
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    rate = matmul_rate(accelerator.device, dtype)
    mean = float(global_sum(accelerator, rate)) / int(accelerator.num_processes)
    if accelerator.is_main_process:
        write_json(path, {"matmul_tflops": round(mean / TERA, 4)})
    return mean


@dataclass
class Lap:
    """A part of a step: its seconds, what models did in it, and what it waited for."""

    seconds: float
    count: FlopCount
    waits: dict[Cause, float]


class Laps:
    """Measures the parts of a step, one after another.

    Args:
        accelerator: of the training.
        rate: of a matrix product, in operations a second.
        tensor_parallel: processes that one model is split over.
    """

    def __init__(self, accelerator: Accelerator, rate: float, tensor_parallel: int = 1) -> None:
        self._accelerator = accelerator
        self._rate = rate
        self._tensor_parallel = tensor_parallel
        self._laps: dict[str, Lap] = {}
        take_flops()
        take_waits()
        self._began = time.monotonic()

    def end(self, name: str) -> None:
        """End a part, and begin the next one."""
        now = time.monotonic()
        self._laps[name] = Lap(now - self._began, take_flops(), take_waits())
        self._began = now

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part in this process, as metrics."""
        return {f"seconds/{name}": round(lap.seconds, 2) for name, lap in self._laps.items()}

    def metrics(self) -> dict[str, float]:
        """Over all processes: tokens, operations, utilization and waits; every process calls it."""
        laps = list(self._laps.values())
        mine = [
            sum(lap.count.tokens for lap in laps),
            sum(lap.count.passes for lap in laps),
            *(sum(lap.waits[cause] for lap in laps) for cause in WAITS),
            *(lap.seconds for lap in laps),
            *(lap.count.flops for lap in laps),
        ]
        totals = global_sum(self._accelerator, torch.tensor(mine, dtype=torch.float64)).tolist()
        processes = int(self._accelerator.num_processes)
        tokens, passes, *rest = totals
        waits, rest = rest[: len(WAITS)], rest[len(WAITS) :]
        seconds = rest[: len(laps)]
        flops = [value / self._tensor_parallel for value in rest[len(laps) :]]
        whole = max(sum(seconds), 1e-9)
        metrics = {
            "speed/tokens_per_second": tokens / self._tensor_parallel * processes / whole,
            "speed/tokens_per_pass": tokens / max(passes, 1),
            "speed/tflops": sum(flops) / whole / TERA,
            "speed/utilization": sum(flops) / whole / self._rate,
        }
        if len(laps) > 1:
            for name, operations, lap_seconds in zip(self._laps, flops, seconds, strict=True):
                metrics[f"speed/utilization_{name}"] = (
                    operations / max(lap_seconds, 1e-9) / self._rate
                )
        for cause, waited in zip(WAITS, waits, strict=True):
            metrics[f"seconds/waiting_for_{cause}"] = waited / processes
        return {name: float(f"{value:.4g}") for name, value in metrics.items()}


@dataclass(frozen=True)
class Use:
    """How a run used its devices, and what to change.

    Attributes:
        seconds: of all steps.
        tokens_per_second: read by any model, over all processes.
        tflops: 10¹² operations a second of each process.
        matmul_tflops: those of a large matrix product.
        utilization: tflops / matmul_tflops.
        waiting_for_data: share of the time.
        waiting_for_ranks: share of the time.
        advice: what to change; empty where nothing that was measured asks for it.
    """

    seconds: float
    tokens_per_second: float
    tflops: float
    matmul_tflops: float
    utilization: float
    waiting_for_data: float
    waiting_for_ranks: float
    advice: str


def describe_use(
    rows: Sequence[dict[str, Any]],
    rate: float,
    clocks: Sequence[str],
    longer_passes: str,
    *,
    all_counted: bool = True,
    profiling: str = "",
) -> dict[str, Any] | None:
    """A run's speed by its metrics; None where no step was measured.

    Args:
        rows: the metrics of its steps; those of an earlier version have no speed.
        rate: of a matrix product, in operations a second.
        clocks: the metrics whose sum is the seconds of a step.
        longer_passes: flags that make forward passes longer.
        all_counted: whether all operations are counted; low use is no news where vLLM samples.
        profiling: flag that traces steps, where there is one.
    """
    rows = [row for row in rows if "speed/tflops" in row]
    seconds = [sum(row[name] for name in clocks) for row in rows]
    whole = float(sum(seconds))
    if not whole:
        return None

    def mean(name: str) -> float:
        total: float = sum(row[name] * taken for row, taken in zip(rows, seconds, strict=True))
        return total / whole

    tflops = mean("speed/tflops")
    shares = {
        cause: sum(row[f"seconds/waiting_for_{cause}"] for row in rows) / whole for cause in WAITS
    }
    length = mean("speed/tokens_per_pass")
    phases = {name: sum(row[name] for row in rows) / whole for name in clocks}
    share = tflops * TERA / rate if all_counted else 1.0
    use = Use(
        seconds=whole,
        tokens_per_second=mean("speed/tokens_per_second"),
        tflops=tflops,
        matmul_tflops=rate / TERA,
        utilization=tflops * TERA / rate,
        waiting_for_data=shares["data"],
        waiting_for_ranks=shares["ranks"],
        advice=advise(share, shares, length, phases, longer_passes, profiling),
    )
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(use).items()}


def advise(
    utilization: float,
    waits: dict[Cause, float],
    tokens_per_pass: float,
    phases: dict[str, float],
    longer_passes: str,
    profiling: str = "",
) -> str:
    """Advice in a sentence: on the largest wait of a fifth of the time or more.

    Else, where less than a tenth of the device is used: sampling, if it takes half of the time, or
    passes of fewer than 512 tokens. Where none of these was measured: `profiling`, a flag that
    shows more, or nothing if there is none.
    """
    cause = max(waits, key=lambda name: waits[name])
    if waits[cause] >= NOTABLE_WAIT:
        activity, remedy = LACKING[cause]
        return f"{waits[cause]:.0%} of the time was spent {activity}: {remedy}."
    if utilization >= LOW_UTILIZATION:
        return ""
    used = f"{utilization:.1%} of the device was used"
    sampling = phases.get("seconds/sample", 0.0)
    if sampling >= 0.5:
        return (
            f"{used}, and {sampling:.0%} of the time was spent sampling: sample more responses at "
            "once (--sampling.batch-size), or use --sampling.engine vllm."
        )
    if tokens_per_pass < SHORT_PASS:
        return (
            f"{used}, and a forward pass had {tokens_per_pass:,.0f} tokens on average: longer "
            f"passes take less time for each token ({longer_passes})."
        )
    if not profiling:
        return ""
    return f"{used}, and no wait or short pass explains it: {profiling} shows where the time goes."
