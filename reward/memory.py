"""Whether a training fits this machine, before anything is loaded, and what to do if not."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from reward.settings import RewardSettings
from rlhf.errors import ConfigError
from rlhf.parallel.distributed import choose_precision
from rlhf.parallel.sharding import Sharding
from rlhf.planning.planner import GIB, Item, Plan, Shape, part_of, read_shape, reward_plan
from rlhf.ranks import world_size
from rlhf.run.preflight import room_bytes

WAYS_OUT = 3
PARTS = (2, 4, 8, 16, 32, 64)
DIVIDED = {
    "zero1": ("Adam", "square roots"),
    "zero2": ("Adam", "square roots", "gradients", "buckets"),
}


def room_for(settings: RewardSettings) -> int:
    """Bytes of the checkpoints that are kept, of one more while it is written, and of the model.

    Evaluations while training keep the best state besides.
    """
    shape = read_shape(settings.model)
    trained = shape.reward_parameters
    if settings.adapter != "none":
        trained = settings.lora_rank * shape.lora_rows + shape.hidden
    kept = settings.keep_checkpoints + bool(settings.eval_every)
    return room_bytes(trained, shape.reward_parameters, kept)


def plan_memory(settings: RewardSettings, shape: Shape) -> Plan:
    """What each process would hold if it divided nothing, when the longest sequences come."""
    tensor_parallel = settings.tensor_parallel
    has_buckets = tensor_parallel == 1 and settings.sharding != "fsdp"
    return reward_plan(
        part_of(shape, tensor_parallel),
        tokens=max(settings.tokens_per_batch, settings.max_length),
        length=settings.max_length,
        bf16=choose_precision(settings.precision) == "bf16",
        checkpointing=settings.gradient_checkpointing,
        processes=_processes(settings) if has_buckets else 1,
        adapter=settings.adapter,
        lora_rank=settings.lora_rank,
    )


def plan_divided(settings: RewardSettings) -> Plan:
    """What each process will hold, as far as the flags alone say."""
    sharding = Sharding(settings.sharding, settings.offload)
    parts = settings.shard_group or _processes(settings)
    return divide(plan_memory(settings, read_shape(settings.model)), sharding, parts)


def _processes(settings: RewardSettings) -> int:
    return max(settings.processes, world_size())


def device_bytes(processes: int) -> float:
    """Memory of this process's device: a GPU's, or its share of main memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local


def divide(plan: Plan, sharding: Sharding, parts: int) -> Plan:
    """The least that a process holds when a plan is divided, or waits in main memory.

    Args:
        plan: for a process that holds everything.
        sharding: what of it is divided.
        parts: processes that divide it.
    """
    share = 0.0 if sharding.offload else 1 / parts
    words = "waits in main memory" if sharding.offload else f"divided by {parts}"

    def held(items: Iterable[Item]) -> tuple[Item, ...]:
        return tuple(
            replace(item, size=share * item.size, why=f"{item.why}; {words}")
            if share < 1 and is_sharded(item, sharding)
            else item
            for item in items
        )

    gathers = share < 1 and sharding.shards_weights
    return Plan(
        plan.title + ", besides what is gathered at the time" * gathers,
        held(plan.resident),
        {phase: held(items) for phase, items in plan.phases.items()},
    )


def divided_peak(plan: Plan, sharding: Sharding, parts: int) -> float:
    """Bytes at the peak of a plan that is divided."""
    return divide(plan, sharding, parts).peak


def is_sharded(item: Item, sharding: Sharding) -> bool:
    """Whether processes hold parts of an item of a plan."""
    if sharding.shards_weights:
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
    divided = sharding or Sharding()
    plan = divide(plan_memory(settings, shape), divided, parts)
    if plan.peak <= has:
        return
    ways = [
        *_lighter(settings, shape, has, divided, parts),
        *_over_processes(settings, shape, has),
        f"a device with {plan.peak / GIB:.1f} GiB or more",
        "a smaller --model",
        "a shorter --max-length, with fewer --tokens-per-batch",
    ]
    listed = "\n".join(f"  {number}. {way}" for number, way in enumerate(ways[:WAYS_OUT], start=1))
    raise ConfigError(
        f"This training needs {plan.peak / GIB:.1f} GiB in each process, which has "
        f"{has / GIB:.1f}.\n{plan.text}",
        f"Three ways out:\n{listed}",
    )


def _lighter(
    settings: RewardSettings, shape: Shape, has: float, sharding: Sharding, parts: int
) -> Iterator[str]:
    """Flags under which the same training fits, the least intrusive first."""
    adapters: list[dict[str, Any]] = [{}]
    if not sharding.is_sharded:  # adapters leave little to divide: the settings refuse them
        names = ("lora", "qlora") if torch.cuda.is_available() else ("lora",)
        adapters += [{"adapter": name} for name in names if name != settings.adapter]
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


def _over_processes(settings: RewardSettings, shape: Shape, has: float) -> Iterator[str]:
    """The fewest processes that can divide all weights."""
    if settings.adapter != "none":
        return
    usual = {"sharding": "fsdp", "tensor_parallel": 1, "shard_group": 0, "ddp_comm_hook": "no"}
    changes: dict[str, Any] = {
        name: value for name, value in usual.items() if getattr(settings, name) != value
    }
    plan = plan_memory(replace(settings, **changes), shape)
    for parts in PARTS:
        peak = divided_peak(plan, Sharding("fsdp"), parts)
        if peak <= has:
            flags = _flags(changes | {"processes": parts})
            yield f"{flags}: {peak / GIB:.1f} GiB on each of {parts}"
            return


def _flags(changes: dict[str, Any]) -> str:
    words = (
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in changes.items()
    )
    return " ".join(words)
