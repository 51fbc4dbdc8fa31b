"""Ways to spread a training over N devices, compared by the memory that each device needs.

Bytes of weights, gradients and optimizer on each of N devices, for P trained and F frozen
parameters, A parameters of LoRA adapters, and the parameters G of one layer:

    DDP      18·P + 4·P (N > 1) + 4·F   float32 weights, gradients, Adam's two moments, bf16 copies,
                                        buckets: what the commands here do
    ZeRO-1   4·P + 12·P/N + 2·F         bf16 weights, gradients; float32 weights and Adam divided
    ZeRO-2   2·P + 14·P/N + 2·F         gradients divided too
    ZeRO-3   16·P/N + 4·G + 2·F/N       weights divided too; two layers gathered in bf16
    FSDP     16·P/N + 4·G + 4·F/N       the same from float32 weights
    LoRA     2·P + 16·A + 2·F           frozen bf16 weights; only adapters are trained

The ZeRO lines are those of arXiv 1910.02054, section 5 (2 + 2 + K bytes with K = 12 for Adam).
"""

from dataclasses import dataclass

from rlhf.planner import BF16, FP32, Plan, Shape, ppo_plan, reference_plan, reward_plan

STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "LoRA")
USABLE = 0.9
MAX_GPUS = 4096


@dataclass(frozen=True)
class Load:
    """What each device computes, whatever the strategy."""

    length: int
    batch: int
    checkpointing: bool
    lora_rank: int


def state_bytes(
    strategy: str, *, trained: float, frozen: float, adapters: float, layer: float, gpus: int
) -> float:
    """Bytes of weights, gradients and optimizer on each of `gpus` devices, by the table above.

    Args:
        strategy: one of STRATEGIES.
        trained: parameters of the trained models.
        frozen: parameters of models that are only asked.
        adapters: parameters of LoRA adapters on the trained models.
        layer: parameters of one layer.
        gpus: devices.
    """
    gathered = 2 * BF16 * layer if gpus > 1 else 0.0
    sizes = {
        "DDP": (18 + (FP32 if gpus > 1 else 0)) * trained + FP32 * frozen,
        "ZeRO-1": 4 * trained + 12 * trained / gpus + BF16 * frozen,
        "ZeRO-2": 2 * trained + 14 * trained / gpus + BF16 * frozen,
        "ZeRO-3": 16 * trained / gpus + gathered + BF16 * frozen / gpus,
        "FSDP": 16 * trained / gpus + gathered + FP32 * frozen / gpus,
        "LoRA": BF16 * trained + 16 * adapters + BF16 * frozen,
    }
    return float(sizes[strategy])


def computing_bytes(stage: str, shape: Shape, load: Load) -> float:
    """Activations, logits, keys and values at the peak of a stage, which no strategy divides."""
    counted = ("activations", "logits", "keys and values", "one layer")
    return max(
        sum(item.size for item in items if any(word in item.what for word in counted))
        for items in _plan(stage, shape, load).phases.values()
    )


def _plan(stage: str, shape: Shape, load: Load) -> Plan:
    prompt = load.length // 2
    new = load.length - prompt
    if stage == "reward":
        return reward_plan(
            shape,
            tokens=load.batch * load.length,
            length=load.length,
            bf16=True,
            checkpointing=load.checkpointing,
            processes=1,
        )
    if stage == "reference":
        return reference_plan(shape, None, batch=load.batch, prompt=prompt, new=new, bf16=True)
    return ppo_plan(
        shape,
        shape,
        sample_batch=load.batch,
        episodes=load.batch,
        reference_rows=0,
        prompt=prompt,
        new=new,
        bf16=True,
        processes=1,
        checkpointing=load.checkpointing,
    )


def stage_bytes(stage: str, strategy: str, shape: Shape, load: Load, gpus: int) -> float:
    """Bytes on each of `gpus` devices for a stage (reward, reference or ppo) under a strategy."""
    trained, frozen = {
        "reward": (shape.reward_parameters, 0),
        "reference": (0, shape.parameters),
        "ppo": (shape.parameters + shape.reward_parameters, shape.reward_parameters),
    }[stage]
    models = {"reward": 1, "reference": 0, "ppo": 2}[stage]
    state = state_bytes(
        strategy,
        trained=trained,
        frozen=frozen,
        adapters=models * load.lora_rank * shape.lora_rows,
        layer=shape.trunk_linear / shape.layers,
        gpus=gpus,
    )
    return state + computing_bytes(stage, shape, load)


def advice(stage: str, shape: Shape, load: Load, gpus: int, usable: float) -> str:
    """What to do about a stage for which no strategy fits; empty when one does."""
    if any(stage_bytes(stage, one, shape, load, gpus) <= usable for one in STRATEGIES):
        return ""
    lighter = Load(load.length, load.batch, True, load.lora_rank)
    lightest = Load(load.length, 1, True, load.lora_rank)
    tries = ((lighter, "with --gradient-checkpointing"),
             (lightest, "with --gradient-checkpointing and --batch 1"))  # fmt: skip
    for other, words in tries:
        for one in STRATEGIES:
            if stage_bytes(stage, one, shape, other, gpus) <= usable:
                return f"{stage}: {one} fits {words}."
    count = 2 * gpus
    while count <= MAX_GPUS:
        if stage_bytes(stage, "ZeRO-3", shape, lightest, count) <= usable:
            return f"{stage}: ZeRO-3 fits on {count} such GPUs {tries[1][1]}."
        count *= 2
    return (
        f"{stage}: nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."
    )
