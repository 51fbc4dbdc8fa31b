"""Whether a training fits this machine, before anything is loaded, and what to do if not."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from reward.settings import RewardSettings
from rlhf.distributed import choose_precision
from rlhf.errors import ConfigError
from rlhf.planner import GIB, Plan, Shape, read_shape, reward_plan

WAYS_OUT = 3
PARTS = (2, 4, 8, 16, 32, 64)


def plan_memory(settings: RewardSettings, shape: Shape) -> Plan:
    """What each process will hold, when the longest sequences come."""
    return reward_plan(
        shape,
        tokens=max(settings.tokens_per_batch, settings.max_length),
        length=settings.max_length,
        bf16=choose_precision(settings.precision) == "bf16",
        checkpointing=settings.gradient_checkpointing,
        processes=max(settings.processes, int(os.environ.get("WORLD_SIZE", "1"))),
        adapter=settings.adapter,
        lora_rank=settings.lora_rank,
    )


def device_bytes(processes: int) -> float:
    """Memory of this process's device: a GPU's, or its share of main memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local


def divided_peak(plan: Plan, parts: int, *, offload: bool) -> float:
    """The least that a device holds when all but activations is divided, or waits in main memory.

    Args:
        plan: for a process that holds everything.
        parts: processes that divide it; 1 for none.
        offload: weights and optimizer are in main memory.
    """
    if parts == 1:
        return plan.peak
    items = plan.phases["computing gradients"]
    activations = sum(item.size for item in items if item.what == "activations")
    return activations + (0 if offload else (plan.peak - activations) / parts)


def require_memory(settings: RewardSettings, has: float, parts: int = 1) -> None:
    """Refuse a training that cannot fit.

    Args:
        settings: of the training.
        has: bytes of each process's device.
        parts: processes that divide weights and optimizer.

    Raises:
        ConfigError: the planned peak is larger; with its parts, and three ways out.
    """
    shape = read_shape(settings.model)
    plan = plan_memory(settings, shape)
    peak = divided_peak(plan, parts, offload=settings.offload)
    if peak <= has:
        return
    ways = [*_lighter(settings, shape, has), *_elsewhere(plan, has)]
    listed = "\n".join(f"  {number}. {way}" for number, way in enumerate(ways[:WAYS_OUT], start=1))
    raise ConfigError(
        f"This training needs {peak / GIB:.1f} GiB in each process, which has "
        f"{has / GIB:.1f}.\n{plan.text}",
        f"Three ways out:\n{listed}",
    )


def _lighter(settings: RewardSettings, shape: Shape, has: float) -> Iterator[str]:
    """Flags under which the same training fits, the least intrusive first."""
    adapters: list[dict[str, Any]] = [{}, {"adapter": "lora"}]
    if torch.cuda.is_available():
        adapters.append({"adapter": "qlora"})
    for adapter in adapters:
        for saving in (
            {},
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "tokens_per_batch": settings.max_length},
        ):
            lighter = replace(settings, **adapter, **saving)
            peak = plan_memory(lighter, shape).peak
            if lighter != settings and peak <= has:
                yield f"{_flags(adapter | saving)}: {peak / GIB:.1f} GiB"
                break


def _flags(changes: dict[str, Any]) -> str:
    words = (
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in changes.items()
    )
    return " ".join(words)


def _elsewhere(plan: Plan, has: float) -> Iterator[str]:
    for parts in PARTS:
        peak = divided_peak(plan, parts, offload=False)
        if peak <= has:
            yield f"--sharding fsdp --processes {parts}: {peak / GIB:.1f} GiB on each of {parts}"
            break
    yield f"a device with {plan.peak / GIB:.0f} GiB or more"
    yield "a smaller --model"
    yield "a shorter --max-length, with fewer --tokens-per-batch"
