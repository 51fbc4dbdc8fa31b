"""Which way of training `rlhf plan` advises, and the flags that ask for it."""

from dataclasses import dataclass, replace

from rlhf.planning.plan import STAGES
from rlhf.planning.planner import FP32, Shape
from rlhf.planning.strategies import SHARDINGS, Load, computing_bytes, stage_bytes

# DDP is the fastest, FSDP needs no further package, LoRA trains less
PREFERRED = ("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "LoRA")
ADAPTERS = {"reward": "--adapter lora", "ppo": "--lora.share-base"}
CHECKPOINTING = "--batch.gradient-checkpointing"
MAX_GPUS = 4096
MAX_BATCH = 1024
NOTHING_FITS = "nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."


@dataclass(frozen=True)
class Advice:
    """What fits.

    Attributes:
        sentence: for people.
        flags: those that ask for it; None where nothing fits.
        processes: how many a command starts.
    """

    sentence: str
    flags: tuple[str, ...] | None = None
    processes: int = 1


def advice_for_all(shape: Shape, load: Load, gpus: int, usable: float) -> dict[str, Advice]:
    """The advice for each stage, whose commands work together.

    `rlhf ppo --lora.share-base` needs a reward model with adapters.
    """
    found = {stage: advice(stage, shape, load, gpus, usable) for stage in STAGES}
    if ADAPTERS["ppo"] in (found["ppo"].flags or ()):
        reward = advice("reward", shape, load, gpus, usable, ("LoRA",))
        why = "; ppo --lora.share-base needs adapters."
        found["reward"] = replace(reward, sentence=reward.sentence.removesuffix(".") + why)
    return found


def advice(
    stage: str,
    shape: Shape,
    load: Load,
    gpus: int,
    usable: float,
    strategies: tuple[str, ...] = PREFERRED,
) -> Advice:
    """The first strategy that fits, with the largest batch; else what would make one fit."""
    if stage == "reference":
        return _reference_advice(shape, load, gpus, usable)
    checkpointed = replace(load, checkpointing=True)
    lightest = replace(checkpointed, batch=1)
    for one, again in ((load, ()), (checkpointed, (CHECKPOINTING,)), (lightest, (CHECKPOINTING,))):
        for strategy in strategies:
            if stage_bytes(stage, strategy, shape, one, gpus) <= usable:
                batch = _largest_batch(stage, strategy, shape, one, gpus, usable)
                words = f"{stage}: {strategy}{''.join(f' with {flag}' for flag in again)}"
                sentence = f"{words}, up to {_sequences(batch)} in a forward pass."
                flags = _strategy_flags(stage, strategy, one, gpus)
                flags += (CHECKPOINTING,) * one.checkpointing
                flags += _batch_flags(stage, replace(one, batch=batch))
                return Advice(sentence, flags, gpus)
    count = 2 * gpus
    while count <= MAX_GPUS:
        if stage_bytes(stage, "FSDP", shape, replace(lightest, group=None), count) <= usable:
            smallest = " ".join((CHECKPOINTING, *_batch_flags(stage, lightest)))
            return Advice(f"{stage}: FSDP fits on {count} such GPUs with {smallest}.")
        count *= 2
    return Advice(f"{stage}: {NOTHING_FITS}")


def _strategy_flags(stage: str, strategy: str, load: Load, gpus: int) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if strategy == "LoRA":
        flags = (ADAPTERS[stage], f"--lora.rank {load.lora_rank}")
    elif strategy != "DDP" and gpus > 1:
        flags = (f"--sharding {SHARDINGS[strategy]}",)
        if strategy == "FSDP" and load.group:
            flags += (f"--parallel.shard-group {load.group}",)
    return (*flags, *(_engine_flags(load) if stage == "ppo" else ()))


def _engine_flags(load: Load) -> tuple[str, ...]:
    if not load.vllm:
        return ()
    parts = f"--sampling.engine-tensor-parallel {load.vllm}"
    return ("--sampling.engine vllm", *((parts,) if load.vllm > 1 else ()))


def _batch_flags(stage: str, load: Load) -> tuple[str, ...]:
    if stage == "ppo":
        return (
            f"--batch.micro-batch-size {load.batch}",
            f"--sampling.batch-size {load.batch}",
        )
    return (f"--batch.micro-tokens {load.batch * load.length}",)


def _reference_advice(shape: Shape, load: Load, gpus: int, usable: float) -> Advice:
    """A model in each process, else FSDP with vLLM or tensor parallelism; nothing is trained."""
    lightest = replace(load, batch=1)
    alone = replace(load, vllm=min(load.vllm, 1))  # an engine that is shared needs FSDP
    for one in (alone, replace(alone, batch=1)):
        if stage_bytes("reference", "DDP", shape, one, gpus) <= usable:
            batch = _largest_batch("reference", "DDP", shape, one, gpus, usable)
            sentence = f"reference: DDP, up to {_sequences(batch)} in a forward pass."
            return Advice(sentence, (*_engine_flags(one), f"--batch-size {batch}"), gpus)
    for one in (load, lightest):
        if load.vllm and stage_bytes("reference", "FSDP", shape, one, gpus) <= usable:
            flags = ("--sharding fsdp", *_engine_flags(one), f"--batch-size {one.batch}")
            sentence = f"reference: FSDP, {_sequences(one.batch)} in a forward pass."
            return Advice(sentence, flags, gpus)
    for one in (load, lightest):
        count = _fewest_tensor_parallel(shape, one, gpus, usable)
        if count:
            flags = (f"--parallel.tensor-parallel {count}", f"--batch-size {one.batch}")
            words = f"each model in {count} processes, {_sequences(one.batch)} in a forward pass."
            return Advice(f"reference: {words}", flags, count)
    return Advice(f"reference: {NOTHING_FITS}")


def _sequences(number: int) -> str:
    return f"{number} sequence{'s' * (number > 1)}"


def _fewest_tensor_parallel(shape: Shape, load: Load, gpus: int, usable: float) -> int:
    """The fewest devices, 2, 4, …, that hold a frozen model in parts; 0 where `gpus` are too few.

    What is computed counts whole, though attention and MLP are divided too.
    """
    computing = max(computing_bytes("reference", shape, load).values())
    parts = 2
    while parts <= gpus:
        if FP32 * shape.parameters / parts + computing <= usable:
            return parts
        parts *= 2
    return 0


def _largest_batch(
    stage: str, strategy: str, shape: Shape, load: Load, gpus: int, usable: float
) -> int:
    """The largest power of two that fits, or the given batch if that is larger."""
    batch = load.batch
    larger = 1
    while larger <= MAX_BATCH:
        if stage_bytes(stage, strategy, shape, replace(load, batch=larger), gpus) <= usable:
            batch = max(batch, larger)
        larger *= 2
    return batch
