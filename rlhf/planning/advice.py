"""Which way of training `rlhf plan` advises, and the flags that ask for it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlhf.planning.plan import GIB, STAGES, MemoryPhase, SampleBatch, ShardLayout
from rlhf.planning.planner import Shape
from rlhf.planning.sampling_plan import reference_plan
from rlhf.planning.strategies import (
    DDP,
    DDP_BF16_WEIGHTS,
    FSDP,
    FSDP_BF16_WEIGHTS,
    LORA,
    ZERO1,
    ZERO2,
    ZERO3,
    Load,
    Option,
    options_for,
    phase_bytes,
    stage_bytes,
    tensor_parallel_bytes,
)
from rlhf.planning.traffic import tensor_parallel_traffic

# what changes numbers least comes first: float32 weights, rounded ones, adapters. In each, DDP is
# the fastest, and FSDP needs no further package
PREFERRED: tuple[tuple[Option, ...], ...] = (
    (DDP, FSDP, ZERO1, ZERO2, ZERO3),
    (DDP_BF16_WEIGHTS, FSDP_BF16_WEIGHTS),
    (LORA,),
)
ADAPTERS = {"reward": "--adapter lora", "ppo": "--lora.share-base"}
REDUCED = (DDP, FSDP, FSDP_BF16_WEIGHTS, LORA)  # the others refuse --parallel.reduce-dtype
CHECKPOINTING = "--batch.gradient-checkpointing"
MAX_GPUS = 4096
MAX_BATCH = 1024
GPUS_PER_MACHINE = 8
SHARED_ENGINES = (1, 2, 4, 8)  # GPUs of a machine that share one vLLM
# what the commands have without flags
EPISODES = 64  # of `ppo --batch.episodes-per-step`
NEW_TOKENS = 256  # of `reference --sampling.max-new-tokens`
MAX_LENGTH = 2048  # of `train-reward --data.max-length`
NOTHING_FITS = "nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."


@dataclass(frozen=True)
class Advice:
    """What fits.

    Attributes:
        sentence: for people.
        flags: those that ask for it; None where nothing fits.
        processes: how many a command starts.
        phases: bytes on each GPU in every phase, with the batch that is advised.
    """

    sentence: str
    flags: tuple[str, ...] | None = None
    processes: int = 1
    phases: dict[MemoryPhase, float] = field(default_factory=dict)


def gpus_per_machine(gpus: int) -> int:
    """How many of each machine are used: the same number, at most eight."""
    return next(n for n in range(min(gpus, GPUS_PER_MACHINE), 0, -1) if gpus % n == 0)


def advice_for_all(shape: Shape, load: Load, gpus: int, usable: float) -> dict[str, Advice]:
    """The advice for each stage, whose commands work together.

    `rlhf ppo --lora.share-base` needs a reward model with adapters.
    """
    by_stage = {stage: advice(stage, shape, load, gpus, usable) for stage in STAGES}
    if ADAPTERS["ppo"] in (by_stage["ppo"].flags or ()):
        reward = advice("reward", shape, load, gpus, usable, ((LORA,),))
        why = "; ppo --lora.share-base needs adapters."
        by_stage["reward"] = replace(reward, sentence=reward.sentence.removesuffix(".") + why)
    return by_stage


def advice(
    stage: str,
    shape: Shape,
    load: Load,
    gpus: int,
    usable: float,
    preferred: tuple[tuple[Option, ...], ...] = PREFERRED,
) -> Advice:
    """The first option that fits, with the largest batch; else what would make one fit.

    The first of a group, if need be with activation checkpointing and a batch of one sequence,
    before those of the next group. PPO that fits in no such way is planned with vLLM.
    """
    if stage == "reference":
        return _reference_advice(shape, load, gpus, usable)
    for option, variant in _ways(stage, load, gpus, preferred):
        if stage_bytes(stage, option, shape, variant, gpus) <= usable:
            return _fitting(stage, option, shape, variant, gpus, usable, _added(load, variant))
    lightest = replace(load, checkpointing=True, batch=1)
    count = 2 * gpus
    while count <= MAX_GPUS:
        for variant in (lightest, *_with_engines(stage, lightest, count)):
            if stage_bytes(stage, FSDP, shape, replace(variant, group=None), count) <= usable:
                flags = (
                    CHECKPOINTING,
                    *_added(lightest, variant),
                    *_batch_flags(stage, variant, count),
                )
                return Advice(f"{stage}: FSDP fits on {count} such GPUs with {' '.join(flags)}.")
        count *= 2
    return Advice(f"{stage}: {NOTHING_FITS}")


def _ways(
    stage: str, load: Load, gpus: int, preferred: tuple[tuple[Option, ...], ...]
) -> Iterator[tuple[Option, Load]]:
    """Options and loads, the best first."""
    checkpointed = replace(load, checkpointing=True)
    for adds_engine in (False, True):
        for group in preferred:
            options = [option for option in group if option in options_for(gpus)]
            for light in (load, checkpointed, replace(checkpointed, batch=1)):
                loads = _with_engines(stage, light, gpus) if adds_engine else [light]
                yield from ((option, variant) for variant in loads for option in options)


def _with_engines(stage: str, load: Load, gpus: int) -> list[Load]:
    """The load with vLLM, shared by more GPUs of a machine than as given."""
    each = gpus_per_machine(gpus)
    larger = [n for n in SHARED_ENGINES if n > load.vllm and each % n == 0]
    return [replace(load, vllm=n) for n in larger] if stage == "ppo" else []


def _added(given: Load, load: Load) -> tuple[str, ...]:
    """Flags of a load that were not asked for."""
    checkpointing = (CHECKPOINTING,) if load.checkpointing and not given.checkpointing else ()
    return checkpointing + (_engine_flags(load) if load.vllm != given.vllm else ())


def _fitting(
    stage: str,
    option: Option,
    shape: Shape,
    load: Load,
    gpus: int,
    usable: float,
    added: Sequence[str],
) -> Advice:
    """The advice to take an option; `added`: flags that were not asked for."""
    batch = _largest_batch(stage, option, shape, load, gpus, usable)
    load = replace(load, batch=batch)
    choice = " with ".join((f"{stage}: {option.name}", *([" ".join(added)] if added else ())))
    flags = _option_flags(stage, option, load, gpus)
    flags += (CHECKPOINTING,) if load.checkpointing else ()
    if stage == "reward":
        flags += _unless(MAX_LENGTH, load.length, "--data.max-length")
    return Advice(
        f"{choice}, up to {_sequences(batch)} in a forward pass.",
        flags + _batch_flags(stage, load, gpus),
        gpus,
        phase_bytes(stage, option, shape, load, gpus),
    )


def _unless(usual: int, number: int, flag: str) -> tuple[str, ...]:
    """The flag with its number, unless the command has it without."""
    return () if number == usual else (f"{flag} {number}",)


def tensor_parallel_advice(shape: Shape, load: Load, passes: int, processes: int) -> str:
    """What a reward model takes in each of `processes` under tensor parallelism."""
    held = tensor_parallel_bytes(shape, load, processes) / GIB
    sent = tensor_parallel_traffic(shape, load, passes, processes) / GIB
    return (
        f"reward: --parallel.tensor-parallel {processes} holds {held:,.2f} GiB in each process, "
        f"which sends {sent:,.2f} GiB in one step."
    )


def _option_flags(stage: str, option: Option, load: Load, gpus: int) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if option.lora:
        flags = (ADAPTERS[stage], f"--lora.rank {load.lora_rank}")
    elif option.strategy != "ddp":
        flags = (f"--sharding {option.strategy}",)
        if option.is_fsdp and load.group:
            flags += (f"--parallel.shard-group {load.group}",)
    if option.bf16_weights:
        flags += ("--precision bf16-weights",)
    if load.reduce_dtype != "fp32" and option in REDUCED:
        flags += (f"--parallel.reduce-dtype {load.reduce_dtype}",)
    return (*flags, *(_engine_flags(load) if stage == "ppo" else ()))


def _engine_flags(load: Load) -> tuple[str, ...]:
    if not load.vllm:
        return ()
    parts = f"--sampling.engine-tensor-parallel {load.vllm}"
    return ("--sampling.engine vllm", *((parts,) if load.vllm > 1 else ()))


def _batch_flags(stage: str, load: Load, gpus: int) -> tuple[str, ...]:
    if stage == "ppo":
        episodes = gpus * math.ceil(EPISODES / gpus)  # the same number on each
        return (
            *_unless(EPISODES, episodes, "--batch.episodes-per-step"),
            f"--batch.micro-batch-size {load.batch}",
            f"--sampling.batch-size {load.batch}",
        )
    return (f"--batch.micro-tokens {load.batch * load.length}",)


def _reference_advice(shape: Shape, load: Load, gpus: int, usable: float) -> Advice:
    """A model in each process, else FSDP with vLLM or tensor parallelism; nothing is trained."""
    lightest = replace(load, batch=1)
    length = _unless(NEW_TOKENS, load.length - load.length // 2, "--sampling.max-new-tokens")
    alone = replace(load, vllm=min(load.vllm, 1))  # an engine that is shared needs FSDP
    for variant in (alone, replace(alone, batch=1)):
        if stage_bytes("reference", DDP, shape, variant, gpus) <= usable:
            batch = _largest_batch("reference", DDP, shape, variant, gpus, usable)
            sentence = f"reference: DDP, up to {_sequences(batch)} in a forward pass."
            return Advice(
                sentence, (*_engine_flags(variant), *length, f"--batch-size {batch}"), gpus
            )
    for variant in (load, lightest):
        if load.vllm and stage_bytes("reference", FSDP, shape, variant, gpus) <= usable:
            engine = _engine_flags(variant)
            flags = ("--sharding fsdp", *engine, *length, f"--batch-size {variant.batch}")
            sentence = f"reference: FSDP, {_sequences(variant.batch)} in a forward pass."
            return Advice(sentence, flags, gpus)
    for variant in (load, lightest):
        count = _fewest_tensor_parallel(shape, variant, gpus, usable)
        if count:
            parallel = f"--parallel.tensor-parallel {count}"
            flags = (parallel, *length, f"--batch-size {variant.batch}")
            description = (
                f"each model in {count} processes, {_sequences(variant.batch)} in a forward pass."
            )
            return Advice(f"reference: {description}", flags, count)
    return Advice(f"reference: {NOTHING_FITS}")


def _sequences(number: int) -> str:
    return f"{number} sequence{'s' if number > 1 else ''}"


def _fewest_tensor_parallel(shape: Shape, load: Load, gpus: int, usable: float) -> int:
    """The fewest devices, 2, 4, …, that hold a frozen model in parts; 0 where `gpus` are too few.

    What is computed counts whole, though attention and MLP are divided too.
    """
    sampled = SampleBatch(load.batch, load.length // 2, load.length - load.length // 2)
    parts = 2
    while parts <= gpus:
        plan = reference_plan(shape, None, sampled, bf16=True, layout=ShardLayout(parts=parts))
        if plan.peak <= usable:
            return parts
        parts *= 2
    return 0


def _largest_batch(
    stage: str, option: Option, shape: Shape, load: Load, gpus: int, usable: float
) -> int:
    """The largest power of two that fits, or the given batch if that is larger."""
    batch = load.batch
    larger = 1
    while larger <= MAX_BATCH:
        if stage_bytes(stage, option, shape, replace(load, batch=larger), gpus) <= usable:
            batch = max(batch, larger)
        larger *= 2
    return batch
