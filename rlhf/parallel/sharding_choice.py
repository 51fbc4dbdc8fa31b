"""Choose the sharding from the flags, or from the configuration of `accelerate launch`."""

import os
from dataclasses import replace

import torch
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import distributed
from torch.distributed.fsdp import CPUOffloadPolicy

from rlhf.errors import ConfigError
from rlhf.parallel.distributed import COLLECTIVE_TIMEOUT
from rlhf.parallel.settings import GroupSettings, Strategy, TrainingParallelSettings
from rlhf.parallel.sharding import Sharding
from rlhf.ranks import world_size

ACCELERATE_FSDP = "ACCELERATE_USE_FSDP"
ACCELERATE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"


def choose_sharding(settings: GroupSettings) -> Sharding:
    """The sharding that the flags ask for, else the one `accelerate launch` was configured with.

    Call it before the process group is formed: it reads accelerate's own switches and turns them
    off.

    Raises:
        ConfigError: there is only one process, nothing to offload, the number of processes does
            not fit the groups or tensor parallelism, DeepSpeed cannot write checkpoints in the
            background, or no gradients are added up in the precision that is asked for.
    """
    sharding = _choose(settings)
    parallel = settings.parallel
    if isinstance(parallel, TrainingParallelSettings) and parallel.reduce_dtype != "fp32":
        _require_added_up(sharding, settings)
        sharding = replace(sharding, reduce_dtype=parallel.reduce_dtype)
    checkpoint = getattr(settings, "checkpoint", None)
    if sharding.zero_stage and checkpoint and checkpoint.asynchronous:
        raise ConfigError(
            f"--checkpoint.asynchronous cannot be combined with --sharding {sharding.strategy}: "
            "DeepSpeed writes its checkpoints itself",
            "Leave it out, or use --sharding fsdp.",
        )
    return sharding


def _choose(settings: GroupSettings) -> Sharding:
    strategy, parallel = settings.sharding, settings.parallel
    offload, group = parallel.offload, parallel.shard_group or 0
    wants_fsdp = os.environ.pop(ACCELERATE_FSDP, "false") == "true"
    wants_deepspeed = os.environ.pop(ACCELERATE_DEEPSPEED, "false") == "true"
    if parallel.tensor_parallel > 1:
        _require_all(parallel.tensor_parallel, configured=wants_fsdp or wants_deepspeed)
        return Sharding(tensor_parallel=parallel.tensor_parallel)
    if strategy == "auto" and wants_fsdp:
        return _from_fsdp(FullyShardedDataParallelPlugin(), offload, group)
    if strategy == "auto" and wants_deepspeed:
        return _from_deepspeed(DeepSpeedPlugin(), offload, group)
    sharding = Sharding(strategy, offload, group)
    if offload and not sharding.is_sharded:
        raise ConfigError(
            f"--parallel.offload has no effect with --sharding {strategy}",
            "Add a --sharding that shards state, such as fsdp or zero3.",
        )
    if sharding.is_sharded and "RANK" not in os.environ:
        raise ConfigError(
            f"--sharding {strategy} shards a model over processes, and there is only one",
            "Add --processes N, or start the command under torchrun.",
        )
    _require_whole_groups(sharding)
    if strategy == "fsdp" and offload:
        _init_gpu_and_cpu_group()
    return sharding


def _require_added_up(sharding: Sharding, settings: GroupSettings) -> None:
    """Refuse --parallel.reduce-dtype bf16 where it has no effect."""
    flag = "--parallel.reduce-dtype bf16"
    if world_size() == 1:
        raise ConfigError(
            f"{flag} has no effect in one process, which adds up nothing with others",
            "Add --processes N, or leave it out.",
        )
    if sharding.zero_stage or sharding.is_tensor_parallel:
        other_flag = f"--sharding {sharding.strategy}"
        if sharding.is_tensor_parallel:
            other_flag = f"--parallel.tensor-parallel {sharding.tensor_parallel}"
        raise ConfigError(
            f"{flag} cannot be combined with {other_flag}", "Use --sharding ddp or fsdp."
        )
    if sharding.strategy != "fsdp" and getattr(settings, "precision", None) == "bf16-weights":
        raise ConfigError(
            f"{flag} has no effect with --precision bf16-weights and --sharding "
            f"{sharding.strategy}: the gradients are bf16",
            "Leave it out, or use --sharding fsdp.",
        )


def _require_all(parts: int, *, configured: bool) -> None:
    if configured:
        raise ConfigError(
            f"--parallel.tensor-parallel {parts} has no effect with accelerate's FSDP or DeepSpeed",
            "Start the command with --processes, torchrun or a plain accelerate configuration.",
        )
    if world_size() != parts:
        raise ConfigError(
            f"--parallel.tensor-parallel {parts} needs {parts} processes, and there are "
            f"{world_size()}",
            f"Give --processes {parts}, or as many in --parallel.tensor-parallel as there are.",
        )


def _require_whole_groups(sharding: Sharding) -> None:
    if not sharding.group:
        return
    if sharding.strategy != "fsdp":
        raise ConfigError(
            f"--parallel.shard-group has no effect with --sharding {sharding.strategy}",
            "Add --sharding fsdp, or leave it out.",
        )
    if world_size() % sharding.group:
        raise ConfigError(
            f"--parallel.shard-group {sharding.group} does not divide the {world_size()} processes",
            "Give the processes of one machine, or another divisor of all.",
        )


def _init_gpu_and_cpu_group() -> None:
    """Form a group that also sums tensors in main memory, such as offloaded gradients."""
    if torch.cuda.is_available() and not distributed.is_initialized():
        distributed.init_process_group("cuda:nccl,cpu:gloo", timeout=COLLECTIVE_TIMEOUT)


def _from_fsdp(plugin: FullyShardedDataParallelPlugin, offload: bool, group: int) -> Sharding:
    if plugin.fsdp_version != 2:
        raise ConfigError(
            f"accelerate is configured for FSDP {plugin.fsdp_version}",
            "Write fsdp_version: 2 into its configuration, or give --sharding fsdp.",
        )
    offload = offload or isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    sharding = Sharding("fsdp", offload, group, reshard=bool(plugin.reshard_after_forward))
    _require_whole_groups(sharding)
    if offload:
        _init_gpu_and_cpu_group()
    return sharding


def _from_deepspeed(plugin: DeepSpeedPlugin, offload: bool, group: int) -> Sharding:
    config = plugin.deepspeed_config
    stage = int(config["zero_optimization"]["stage"])
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"DeepSpeed is configured with ZeRO stage {stage}",
            "Use stage 1, 2 or 3, or --sharding ddp.",
        )
    if offload:
        raise ConfigError(
            "--parallel.offload has no effect with a DeepSpeed configuration",
            f"Set offload_optimizer in it, or give --sharding zero{stage}.",
        )
    strategies: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
    sharding = Sharding(strategies[stage], group=group, deepspeed=config)
    _require_whole_groups(sharding)
    return sharding
