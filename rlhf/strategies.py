"""Ways to spread a training over N devices, compared by what each device holds and sends.

Bytes of weights, gradients and optimizer on each of N devices, for P trained and F frozen
parameters, A parameters of LoRA adapters, and the parameters G of one layer, as `--sharding` does
it (LoRA: `--adapter lora`):

    DDP      18·P + 4·P (N > 1) + 4·F   float32 weights, gradients, Adam's two moments, bf16 copies,
                                        buckets
    ZeRO-1   10·P + 12·P/N + 4·F        float32 weights, gradients, bf16 copies; what Adam works on
                                        (weights again, two moments) divided
    ZeRO-2   6·P + 16·P/N + 4·F         gradients divided too
    ZeRO-3   20·P/N + 12·G + 4·F        weights divided too; two layers gathered, with bf16 copies
    FSDP     16·P/N + 12·G + 4·F        the same, without a second copy of the weights
    LoRA     2·P + 16·A + 2·F           frozen bf16 weights; only adapters are trained

The ZeRO lines are those of arXiv 1910.02054, section 5, with float32 in the place of 16 bits.
While PPO samples under ZeRO-3 or FSDP, every device holds policy and critic whole besides: 4·P.

Bytes that each device sends and receives in one optimizer step of M forward and backward passes,
W = 4·P the weights, of which B sit in layers, each times (N − 1)/N:

    DDP      2·W                one all-reduce of the gradients: reduce-scatter and all-gather
    ZeRO-1   3·W                the same, and an all-gather of the stepped weights
    ZeRO-2   (2·M + 1)·W        gradients in each pass: DeepSpeed sums before it divides
    ZeRO-3   3·M·W              weights forward and backward, gradients, each pass
    FSDP     M·(W + B) + W      layers forward and backward, the rest once a pass; gradients once
    LoRA     2·4·A              as DDP
"""

from dataclasses import dataclass

from rlhf.planner import BF16, FP32, Plan, Shape, ppo_plan, reference_plan, reward_plan

STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "LoRA")
WHOLE_WHILE_SAMPLING = ("ZeRO-3", "FSDP")
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
    gathered = 2 * (FP32 + BF16) * layer if gpus > 1 else 0.0
    sizes = {
        "DDP": (18 + (FP32 if gpus > 1 else 0)) * trained + FP32 * frozen,
        "ZeRO-1": 10 * trained + 12 * trained / gpus + FP32 * frozen,
        "ZeRO-2": 6 * trained + 16 * trained / gpus + FP32 * frozen,
        "ZeRO-3": 20 * trained / gpus + gathered + FP32 * frozen,
        "FSDP": 16 * trained / gpus + gathered + FP32 * frozen,
        "LoRA": BF16 * trained + 16 * adapters + BF16 * frozen,
    }
    return float(sizes[strategy])


def communication_bytes(
    strategy: str, *, trained: float, in_layers: float, adapters: float, passes: int, gpus: int
) -> float:
    """Bytes that each of `gpus` devices sends in one optimizer step, by the table above.

    Args:
        strategy: one of STRATEGIES.
        trained: parameters of the trained models.
        in_layers: how many of them sit in layers.
        adapters: parameters of LoRA adapters on the trained models.
        passes: forward and backward passes of each device in a step.
        gpus: devices.
    """
    counted = {
        "DDP": 2 * trained,
        "ZeRO-1": 3 * trained,
        "ZeRO-2": (2 * passes + 1) * trained,
        "ZeRO-3": 3 * passes * trained,
        "FSDP": passes * (trained + in_layers) + trained,
        "LoRA": 2 * adapters,
    }
    return FP32 * counted[strategy] * (gpus - 1) / gpus


def step_bytes(
    stage: str, strategy: str, shape: Shape, load: Load, passes: int, gpus: int
) -> float:
    """Bytes that each device sends in a step of a stage; to sample, PPO gathers weights once."""
    models = {"reward": 1, "reference": 0, "ppo": 2}[stage]
    trained, _ = _parameters(stage, shape)
    # what is no layer: embeddings, the final norm, output matrix or head
    in_layers = models * (shape.trunk - (shape.vocabulary + 1) * shape.hidden)
    moved = communication_bytes(
        strategy,
        trained=trained,
        in_layers=in_layers,
        adapters=models * load.lora_rank * shape.lora_rows,
        passes=passes,
        gpus=gpus,
    )
    samples = stage == "ppo" and strategy in WHOLE_WHILE_SAMPLING
    return moved + (FP32 * trained * (gpus - 1) / gpus if samples else 0.0)


def step_seconds(
    stage: str,
    strategy: str,
    shape: Shape,
    load: Load,
    passes: int,
    gpus: int,
    *,
    tflops: float,
    network: float,
) -> float:
    """Seconds of a step's forward and backward passes, and of its traffic, one after the other.

    6 operations for each parameter and token, 8 where activations are computed again; sampling is
    not in it.

    Args:
        stage: reward or ppo; reference takes no steps.
        strategy: one of STRATEGIES.
        shape: the model.
        load: what each device computes.
        passes: forward and backward passes of each device in a step.
        gpus: devices.
        tflops: 10¹² operations a second that a device really does.
        network: gigabytes a second that a device really sends.
    """
    trained, _ = _parameters(stage, shape)
    operations = (8 if load.checkpointing else 6) * trained * load.length * load.batch * passes
    moved = step_bytes(stage, strategy, shape, load, passes, gpus)
    return operations / (tflops * 1e12) + moved / (network * 1e9)


def computing_bytes(stage: str, shape: Shape, load: Load, whole: float = 0.0) -> float:
    """Activations, logits, keys and values at the peak of a stage, which no strategy divides.

    Args:
        stage: reward, reference or ppo.
        shape: the model.
        load: what each device computes.
        whole: bytes that are there while sampling only.
    """
    counted = ("activations", "logits", "keys and values", "one layer")
    return max(
        sum(item.size for item in items if any(word in item.what for word in counted))
        + (whole if phase == "sampling" else 0.0)
        for phase, items in _plan(stage, shape, load).phases.items()
    )


def _parameters(stage: str, shape: Shape) -> tuple[int, int]:
    """Parameters of a stage's trained models, and of its frozen ones."""
    return {
        "reward": (shape.reward_parameters, 0),
        "reference": (0, shape.parameters),
        "ppo": (shape.parameters + shape.reward_parameters, shape.reward_parameters),
    }[stage]


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
    trained, frozen = _parameters(stage, shape)
    models = {"reward": 1, "reference": 0, "ppo": 2}[stage]
    state = state_bytes(
        strategy,
        trained=trained,
        frozen=frozen,
        adapters=models * load.lora_rank * shape.lora_rows,
        layer=shape.trunk_linear / shape.layers,
        gpus=gpus,
    )
    copies = gpus > 1 and stage == "ppo" and strategy in WHOLE_WHILE_SAMPLING
    return state + computing_bytes(stage, shape, load, FP32 * trained if copies else 0.0)


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
