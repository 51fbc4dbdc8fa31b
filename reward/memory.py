"""Whether a training fits this machine, before anything is loaded, and what to do if not."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from reward.settings import RewardSettings
from rlhf.distributed import choose_precision
from rlhf.errors import ConfigError
from rlhf.planner import GIB, Item, Plan, Shape, part_of, read_shape, reward_plan
from rlhf.preflight import room_bytes
from rlhf.sharding import Sharding

WAYS_OUT = 3
PARTS = (2, 4, 8, 16, 32, 64)
DIVIDED = {
    "zero1": ("Adam", "square roots"),
    "zero2": ("Adam", "square roots", "gradients", "buckets"),
}


def room_for(settings: RewardSettings) -> int:
    """Bytes of the checkpoints that are kept, of one more while it is written, and of the model."""
    shape = read_shape(settings.model)
    trained = shape.reward_parameters
    if settings.adapter != "none":
        trained = settings.lora_rank * shape.lora_rows + shape.hidden
    return room_bytes(trained, shape.reward_parameters, settings.keep_checkpoints)


def plan_memory(settings: RewardSettings, shape: Shape) -> Plan:
    """What each process will hold, when the longest sequences come."""
    together = settings.tensor_parallel
    alone = max(settings.processes, int(os.environ.get("WORLD_SIZE", "1")))
    return reward_plan(
        part_of(shape, together),
        tokens=max(settings.tokens_per_batch, settings.max_length),
        length=settings.max_length,
        bf16=choose_precision(settings.precision) == "bf16",
        checkpointing=settings.gradient_checkpointing,
        processes=1 if together > 1 else alone,
        adapter=settings.adapter,
        lora_rank=settings.lora_rank,
    )


def device_bytes(processes: int) -> float:
    """Memory of this process's device: a GPU's, or its share of main memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local


def divided_peak(plan: Plan, sharding: Sharding, parts: int) -> float:
    """The least that a device holds when a plan is divided, or waits in main memory.

    Args:
        plan: for a process that holds everything.
        sharding: what of it is divided.
        parts: processes that divide it.
    """
    share = 0.0 if sharding.offload else 1 / parts

    def held(items: Iterable[Item]) -> float:
        return sum(item.size * (share if is_divided(item, sharding) else 1.0) for item in items)

    return held(plan.resident) + max(held(items) for items in plan.phases.values())


def is_divided(item: Item, sharding: Sharding) -> bool:
    """Whether processes hold parts of an item of a plan."""
    if sharding.divides_weights:
        return item.what != "activations"
    words = DIVIDED.get(sharding.strategy, ())
    return any(word in item.what for word in words)


def require_memory(
    settings: RewardSettings, has: float, sharding: Sharding | None = None, parts: int = 1
) -> None:
    """Refuse a training that cannot fit.

    Args:
        settings: of the training.
        has: bytes of each process's device.
        sharding: what processes divide; nothing when not given.
        parts: processes that divide it.

    Raises:
        ConfigError: the planned peak is larger; with its parts, and three ways out.
    """
    shape = read_shape(settings.model)
    plan = plan_memory(settings, shape)
    divided = sharding or Sharding()
    peak = divided_peak(plan, divided, parts)
    if peak <= has:
        return
    alone = plan_memory(replace(settings, tensor_parallel=1), shape)
    ways = [*_lighter(settings, shape, has, divided, parts), *_elsewhere(alone, has)]
    listed = "\n".join(f"  {number}. {way}" for number, way in enumerate(ways[:WAYS_OUT], start=1))
    raise ConfigError(
        f"This training needs {peak / GIB:.1f} GiB in each process, which has "
        f"{has / GIB:.1f}.\n{plan.text}",
        f"Three ways out:\n{listed}",
    )


def _lighter(
    settings: RewardSettings, shape: Shape, has: float, sharding: Sharding, parts: int
) -> Iterator[str]:
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
            peak = divided_peak(plan_memory(lighter, shape), sharding, parts)
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
        peak = divided_peak(plan, Sharding("fsdp"), parts)
        if peak <= has:
            yield f"--sharding fsdp --processes {parts}: {peak / GIB:.1f} GiB on each of {parts}"
            break
    yield f"a device with {plan.peak / GIB:.0f} GiB or more"
    yield "a smaller --model"
    yield "a shorter --max-length, with fewer --tokens-per-batch"
