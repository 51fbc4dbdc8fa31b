"""Bytes that each of N devices sends and receives in one optimizer step, and the seconds of one.

For M forward and backward passes, W = 4·P the weights, of which B sit in layers, each times
(N − 1)/N:

    DDP               2·W       one all-reduce of the gradients: reduce-scatter and all-gather
    DDP bf16-weights  W         the same, half as wide
    ZeRO-1            3·W       as DDP, and an all-gather of the stepped weights
    ZeRO-2            (2·M + 1)·W   gradients in each pass: DeepSpeed sums before it divides
    ZeRO-3            3·M·W     weights forward and backward, gradients, each pass; at most, as some
                                weights are still there on the way back
    FSDP              2·M·W     layers forward and backward, half as wide in bf16, matrices twice in
                                float32, the rest once; gradients; each pass. In groups of K of N
                                devices with K for N, and an all-reduce of a part between groups:
                                2·W/K
    FSDP bf16-weights           matrices and the rest are half as wide, too; gradients are float32
    LoRA              2·4·A     as DDP, of A parameters of adapters

With `--parallel.reduce-dtype bf16` gradients are half as wide under DDP, FSDP and LoRA.

Under tensor parallelism processes send what they add up: `tensor_parallel_traffic`.
"""

from dataclasses import dataclass

from rlhf.parallel.settings import ReduceDtype
from rlhf.planning.planner import BF16, FP32, Shape
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
    Sizes,
    parts_of,
    sizes_of,
)


@dataclass(frozen=True)
class Speed:
    """What a device really does.

    Attributes:
        tflops: 10¹² operations a second.
        network: gigabytes that it sends a second.
    """

    tflops: float
    network: float


def communication_bytes(
    option: Option,
    sizes: Sizes,
    passes: int,
    gpus: int,
    group: int | None = None,
    *,
    bf16: bool = True,
    reduce_dtype: ReduceDtype = "fp32",
) -> float:
    """Bytes that each of `gpus` devices sends in one optimizer step, by the table above.

    FSDP shards one copy over `group` devices, by default all, and gathers layers in bf16 if `bf16`.
    `reduce_dtype` is that of gradients under DDP, FSDP and LoRA.
    """
    trained = sizes.trained
    width = {"fp32": 1.0, "bf16": 0.5}[reduce_dtype]  # of gradients, in float32 numbers
    layers = (trained - sizes.outside) * (1.0 if bf16 else 2.0)
    ends = sizes.outside + sizes.matrices
    counted = {
        DDP: 2 * width * trained,
        DDP_BF16_WEIGHTS: trained,
        ZERO1: 3 * trained,
        ZERO2: (2 * passes + 1) * trained,
        ZERO3: 3 * passes * trained,
        FSDP: passes * (ends + layers + width * trained),
        FSDP_BF16_WEIGHTS: passes * (ends / 2 + layers + width * trained),
        LORA: 2 * width * sizes.adapters,
    }
    if option.is_fsdp and group:
        copies = gpus // group
        between = passes * 2 * width * trained / group * (copies - 1) / copies
        return FP32 * (counted[option] * (group - 1) / group + between)
    return FP32 * counted[option] * (gpus - 1) / gpus


def reading_traffic(option: Option, sizes: Sizes) -> float:
    """Bytes of the weights that FSDP gathers in a forward pass alone."""
    outside = BF16 if option.bf16_weights else FP32
    return outside * sizes.outside + BF16 * (sizes.trained - sizes.outside)


def step_bytes(
    stage: str, option: Option, shape: Shape, load: Load, passes: int, gpus: int
) -> float:
    """Bytes that each device sends in a step of a stage.

    To sample, PPO gathers the policy once, for vLLM in bf16. To measure a rollout, FSDP gathers
    both models in as many forward passes as the update has, ZeRO 3 both at once.
    """
    sizes = sizes_of(stage, shape, load)
    moved = communication_bytes(
        option, sizes, passes, gpus, load.group, reduce_dtype=load.reduce_dtype
    )
    if stage != "ppo" or not option.shards_weights:
        return moved
    parts = parts_of(option, load, gpus)
    rounded = option.bf16_weights or (option.is_fsdp and load.vllm)
    gathered = float((BF16 if rounded else FP32) * shape.parameters)
    if option.is_fsdp:
        gathered += passes * reading_traffic(option, sizes)
    else:
        gathered += FP32 * sizes.trained
    return moved + gathered * (parts - 1) / parts


def step_seconds(
    stage: str,
    option: Option,
    shape: Shape,
    load: Load,
    passes: int,
    gpus: int,
    speed: Speed,
) -> float:
    """Seconds of a step's forward and backward passes, and of its traffic, one after the other.

    6 operations for each parameter and token, 8 with gradient checkpointing; sampling is not
    counted. PPO's policy also reads reference rows.
    """
    read = sizes_of(stage, shape, load).trained * load.batch
    if stage == "ppo":
        read += shape.parameters * load.ppo_batch.reference_rows
    operations = (8 if load.checkpointing else 6) * read * load.length * passes
    moved = step_bytes(stage, option, shape, load, passes, gpus)
    return operations / (speed.tflops * 1e12) + moved / (speed.network * 1e9)


def tensor_parallel_traffic(
    shape: Shape, load: Load, passes: int, processes: int, *, bf16: bool = True
) -> float:
    """Bytes that each of N processes sends in a step of a reward model under tensor parallelism.

    For T tokens a number of each of d channels is added up over processes, which sends 2·(N − 1)/N
    of its bytes: once for the embeddings and in every layer twice on the way forward, after
    attention and MLP, and on the way back for each matrix that reads what goes from layer to layer:
    q, k, v, up and, where there is one, gate. Computed again, attention adds up again. With bf16
    only what layers add up forwards is bf16.
    """
    forward = (3 if load.checkpointing else 2) * (BF16 if bf16 else FP32)
    back = FP32 * (5 if shape.gated else 4)
    numbers = passes * load.batch * load.length * shape.hidden
    added_up = numbers * (FP32 + shape.layers * (forward + back))
    return 2 * added_up * (processes - 1) / processes
