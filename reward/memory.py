"""Checks that a training fits into memory, before anything is loaded; suggests what to change."""

from collections.abc import Iterator
from typing import Any

import torch

from reward.settings import RewardSettings
from rlhf.config.paths import flag_of, read_setting, with_changes
from rlhf.errors import ConfigError
from rlhf.parallel.distributed import choose_precision
from rlhf.parallel.settings import SHARDED, Strategy
from rlhf.parallel.sharding import Sharding
from rlhf.planning.plan import GIB, Pass, Plan, ShardLayout, shard_plan, with_whole_gradient
from rlhf.planning.planner import Shape, read_shape, tensor_parallel_shape
from rlhf.planning.training_plan import reward_plan
from rlhf.ranks import world_size
from rlhf.run.preflight import disk_bytes_of

MAX_REMEDIES = 3
CHECKPOINTING = "batch.gradient_checkpointing"
PARTS = (2, 4, 8, 16, 32, 64)


def checkpoint_disk_bytes(settings: RewardSettings) -> int:
    """Bytes on disk of the kept checkpoints, of one more during writing, and of the model.

    Evaluations during training keep the best state in addition.
    """
    shape = read_shape(settings.model)
    trained = shape.reward_parameters
    if settings.adapter != "none":
        trained = settings.lora.rank * shape.lora_rows + shape.hidden
    checkpoints = settings.checkpoint.keep + bool(settings.evaluation.every)
    return disk_bytes_of(trained, shape.reward_parameters, checkpoints)


def plan_memory(settings: RewardSettings, shape: Shape, strategy: Strategy = "auto") -> Plan:
    """The memory of each process with the longest sequences, if nothing were sharded."""
    has_masters = ShardLayout(strategy, bf16_weights=_is_rounded(settings)).has_masters
    tokens = max(settings.batch.micro_tokens, settings.data.max_length)
    parts = settings.parallel.tensor_parallel
    plan = reward_plan(
        tensor_parallel_shape(shape, parts),
        Pass(
            tokens,
            settings.data.max_length,
            settings.batch.gradient_checkpointing,
            _is_rounded(settings),
        ),
        bf16=choose_precision(settings.precision) == "bf16",
        has_stepped_copy=strategy.startswith("zero"),
        adapter=settings.adapter,
        lora_rank=settings.lora.rank,
        has_masters=has_masters,
    )
    return plan if parts == 1 else with_whole_gradient(plan, shape.embedding_bytes)


def plan_sharded(settings: RewardSettings) -> Plan:
    """The memory of each process as the settings shard it."""
    sharding = Sharding(settings.sharding, settings.parallel.offload)
    parts = settings.parallel.shard_group or _processes(settings)
    plan = plan_memory(settings, read_shape(settings.model), sharding.strategy)
    return shard_plan(plan, _layout(sharding, parts))


def _is_rounded(settings: RewardSettings) -> bool:
    return settings.precision == "bf16-weights"


def _processes(settings: RewardSettings) -> int:
    return max(settings.processes, world_size())


def _layout(sharding: Sharding, parts: int) -> ShardLayout:
    return ShardLayout(sharding.strategy, parts, sharding.offload)


def require_memory(
    settings: RewardSettings, has: float, sharding: Sharding | None = None, parts: int = 1
) -> None:
    """Refuse a training that cannot fit.

    Args:
        settings: of the training.
        has: bytes of each process's device.
        sharding: by default nothing is sharded.
        parts: processes that state is sharded over.

    Raises:
        ConfigError: the planned peak is larger; shows the plan and up to three remedies.
    """
    shape = read_shape(settings.model)
    layout = _layout(sharding or Sharding(), parts)
    plan = shard_plan(plan_memory(settings, shape, layout.strategy), layout)
    if plan.peak <= has:
        return
    ways = [
        *_lighter(settings, shape, has, layout),
        *_over_processes(settings, shape, has),
        f"a device with {plan.peak / GIB:.1f} GiB or more",
        "a smaller --model",
        "a shorter --data.max-length, with fewer --batch.micro-tokens",
    ]
    listed = "\n".join(
        f"  {number}. {way}" for number, way in enumerate(ways[:MAX_REMEDIES], start=1)
    )
    raise ConfigError(
        f"This training needs {plan.peak / GIB:.1f} GiB in each process; {has / GIB:.1f} GiB are "
        f"available.\n{plan.text}",
        f"Try one of:\n{listed}",
    )


def _lighter(
    settings: RewardSettings, shape: Shape, has: float, layout: ShardLayout
) -> Iterator[str]:
    """Flags under which the same training fits, the least intrusive first."""
    adapters: list[dict[str, Any]] = [{}]
    # the settings refuse adapters with sharding
    if not SHARDED[layout.strategy] and settings.parallel.tensor_parallel == 1:
        names = ("lora", "qlora") if torch.cuda.is_available() else ("lora",)
        adapters += [{"adapter": name} for name in names if name != settings.adapter]
    for adapter in adapters:
        for saving in (
            {},
            {CHECKPOINTING: True},
            {CHECKPOINTING: True, "batch.micro_tokens": settings.data.max_length},
        ):
            lighter = with_changes(settings, adapter | saving)
            peak = shard_plan(plan_memory(lighter, shape, layout.strategy), layout).peak
            if lighter != settings and peak <= has:
                yield f"{_flags(adapter | saving)}: {peak / GIB:.1f} GiB"
                break


def _over_processes(settings: RewardSettings, shape: Shape, has: float) -> Iterator[str]:
    """The fewest processes over which `--sharding fsdp` fits."""
    if settings.adapter != "none":
        return
    usual = {
        "sharding": "fsdp",
        "parallel.tensor_parallel": 1,
        "parallel.shard_group": None,
        "ddp_comm_hook": "no",
    }
    changes: dict[str, Any] = {
        name: value for name, value in usual.items() if read_setting(settings, name) != value
    }
    plan = plan_memory(with_changes(settings, changes), shape)
    for parts in PARTS:
        peak = shard_plan(plan, ShardLayout("fsdp", parts)).peak
        if peak <= has:
            flags = _flags(changes | {"processes": parts})
            yield f"{flags}: {peak / GIB:.1f} GiB on each of {parts}"
            return


def _flags(changes: dict[str, Any]) -> str:
    flags = (
        flag_of(name) + ("" if value is True else f" {'none' if value is None else value}")
        for name, value in changes.items()
    )
    return " ".join(flags)
