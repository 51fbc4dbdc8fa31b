"""Ways to spread a training over N devices, compared by what each device holds and sends.

Bytes of weights, gradients and optimizer on each of N devices, for P trained and F frozen
parameters, A parameters of LoRA adapters, G parameters of one layer and E outside of layers (M of
them in matrices that FSDP gathers one by one: embeddings, and output matrices of their own), as
`--sharding` does it with bf16 (LoRA: `--adapter lora`):

    DDP      18·P + 4·F                 float32 weights, gradients, Adam's two moments, bf16 copies
    ZeRO-1   10·P + 12·P/N + 4·F        float32 weights, gradients, bf16 copies; what Adam works on
                                        (weights again, two moments) sharded
    ZeRO-2   6·P + 16·P/N + 4·F         gradients sharded too
    ZeRO-3   (20·P + 4·F)/N + 4·R + 8·K  weights sharded too; R of them gathered, without bf16
                                        copies; K gradients being sent, twice; while stepping all
                                        gradients a second time, 4·P/N
    FSDP     (16·P + 4·F)/N + 8·G       no second copy of the weights; layers gathered in bf16: the
             + 4·(E − M)                one at work, the next, one's gradients; the rest whole
    LoRA     2·P + 16·A                 frozen bf16 weights; only adapters are trained

The ZeRO lines are those of arXiv 1910.02054, section 5, with float32 in the place of 16 bits; K is
BUCKET of rlhf/parallel/settings.py; R, weights that DeepSpeed keeps gathered because they are
reused soon, is REUSED; neither is more than P.
FSDP in groups (`--parallel.shard-group`) divides by the size of a group instead of N. Where a
matrix or the rest is larger than layers and activations, the peak is when their gradients are sent:
12 bytes for each of those parameters, their gradients and the copy for communication, and at PPO's
output matrix 16, as it was gathered again just before, beside half of the activations. While PPO
samples under ZeRO-3 or FSDP, every device also holds the whole policy and critic: 4·P. With FSDP
and vLLM it does not: it holds its part of vLLM's bf16 weights and pages, then a layer at a time.
For PPO, LoRA is one model with `--lora.share-base`, as in rlhf/planning/ppo_plan.py. For reference
outputs each device holds the whole model, unless vLLM samples under FSDP.

Bytes that each device sends and receives in one optimizer step of M forward and backward passes,
W = 4·P the weights, of which B sit in layers, each times (N − 1)/N:

    DDP      2·W                one all-reduce of the gradients: reduce-scatter and all-gather
    ZeRO-1   3·W                the same, and an all-gather of the stepped weights
    ZeRO-2   (2·M + 1)·W        gradients in each pass: DeepSpeed sums before it divides
    ZeRO-3   3·M·W              weights forward and backward, gradients, each pass; at most, as R
                                of the weights are still there on the way back
    FSDP     2·M·W              layers forward and backward, half as wide in bf16, matrices twice
                                in float32, the rest once; gradients; each pass. In groups of K of
                                N devices with K for N, and an all-reduce of a part between
                                groups: 2·W/K
    LoRA     2·4·A              as DDP
"""

from dataclasses import dataclass, replace

from rlhf.parallel.settings import BUCKET, State, Strategy
from rlhf.planning.plan import GIB, Layout, Pass, Plan, SampleBatch
from rlhf.planning.planner import (
    BF16,
    FP32,
    Shape,
    reward_plan,
    tensor_parallel_shape,
    vllm_items,
)
from rlhf.planning.ppo_plan import PPOBatch, Roles, ppo_plan
from rlhf.planning.reference_plan import reference_plan

SHARDINGS: dict[str, Strategy] = {
    "DDP": "ddp",
    "ZeRO-1": "zero1",
    "ZeRO-2": "zero2",
    "ZeRO-3": "zero3",
    "FSDP": "fsdp",
}
STRATEGIES = (*SHARDINGS, "LoRA")
WHOLE_WHILE_SAMPLING = ("ZeRO-3", "FSDP")
REUSED = 10**9  # weights: DeepSpeed's stage3_max_reuse_distance, as it comes
USABLE = 0.9


@dataclass(frozen=True)
class Load:
    """What each device computes.

    Attributes:
        length: tokens of a prompt with its response.
        batch: sequences in one forward pass.
        checkpointing: activations are computed again in the backward pass.
        lora_rank: of adapters.
        group: devices over which FSDP shards a copy; None: all.
        vllm: devices that share a vLLM, which samples; 0: transformers samples.
    """

    length: int
    batch: int
    checkpointing: bool
    lora_rank: int
    group: int | None = None
    vllm: int = 0


@dataclass(frozen=True)
class Speed:
    """What a device really does.

    Attributes:
        tflops: 10¹² operations a second.
        network: gigabytes that it sends a second.
    """

    tflops: float
    network: float


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, with the letters of the table above.

    Attributes:
        trained: P, of the trained models.
        frozen: F, of models that only run forward.
        adapters: A, of LoRA adapters on the trained models.
        layer: G, of one layer.
        outside: E, of the models outside of layers: embeddings, last norm, head.
        matrices: M, of them in embeddings and output matrices that FSDP gathers one by one.
        matrix: of the largest of these.
        output: of the policy's output matrix; 0 where that is its embeddings.
    """

    trained: float
    frozen: float = 0.0
    adapters: float = 0.0
    layer: float = 0.0
    outside: float = 0.0
    matrices: float = 0.0
    matrix: float = 0.0
    output: float = 0.0


def state_bytes(strategy: str, sizes: Sizes, gpus: int) -> float:
    """Bytes of weights, gradients and optimizer on each of `gpus` devices, nothing gathered."""
    trained = sizes.trained
    if strategy == "LoRA":
        return BF16 * trained + 16 * sizes.adapters
    layout = Layout(SHARDINGS[strategy], gpus)
    copies = 0 if layout.shards(State.WEIGHTS) else BF16
    stepped = FP32 if layout.strategy.startswith("zero") else 0  # DeepSpeed's own copy
    return (
        layout.held(State.WEIGHTS, (FP32 + copies) * trained + FP32 * sizes.frozen)
        + layout.held(State.GRADIENTS, FP32 * trained)
        + layout.held(State.OPTIMIZER, (2 * FP32 + stepped) * trained)
    )


def passing_bytes(strategy: str, sizes: Sizes, gpus: int, computing: float) -> float:
    """Bytes at the peak of a pass on top of the state: gathered weights, and what is computed.

    `computing` are the bytes of activations and logits, which no strategy shards.
    """
    if gpus == 1:
        return computing
    if strategy == "ZeRO-3":
        gathered, moved = min(REUSED, sizes.trained), min(BUCKET, sizes.trained)
        return computing + FP32 * (gathered + 2 * moved)
    if strategy == "FSDP":
        layers = (3 * BF16 + BF16) * sizes.layer
        rest = sizes.outside - sizes.matrices
        # at the policy's output matrix the critic's activations, about half, are gone already; the
        # matrix is there with the buffer that it was gathered in, its gradients and their copy
        at_output = computing / 2 + layers + 4 * FP32 * sizes.output if sizes.output else 0.0
        at_ends = max(3 * FP32 * sizes.matrix, 2 * FP32 * rest)
        return FP32 * rest + max(computing + layers, at_output, at_ends)
    return computing


def reading_bytes(sizes: Sizes, computing: float, *, bf16: bool = True) -> float:
    """Bytes at the peak of a forward pass alone under FSDP.

    The layer at work; the next and a matrix, each with the buffer that it was gathered in; and the
    rest. With `bf16` layers are gathered in bf16; the original model's are in float32.
    """
    layers = 3 * (BF16 if bf16 else FP32) * sizes.layer
    rest = sizes.outside - sizes.matrices
    return computing + layers + FP32 * (rest + 2 * sizes.matrix)


def communication_bytes(
    strategy: str,
    sizes: Sizes,
    passes: int,
    gpus: int,
    group: int | None = None,
    *,
    bf16: bool = True,
) -> float:
    """Bytes that each of `gpus` devices sends in one optimizer step, by the table above.

    FSDP shards one copy over `group` devices, by default all, and gathers layers in bf16 if `bf16`.
    """
    trained = sizes.trained
    layers = (trained - sizes.outside) * (1.0 if bf16 else 2.0)
    counted = {
        "DDP": 2 * trained,
        "ZeRO-1": 3 * trained,
        "ZeRO-2": (2 * passes + 1) * trained,
        "ZeRO-3": 3 * passes * trained,
        "FSDP": passes * (sizes.outside + sizes.matrices + layers + trained),
        "LoRA": 2 * sizes.adapters,
    }
    if strategy == "FSDP" and group:
        copies = gpus // group
        between = passes * 2 * trained / group * (copies - 1) / copies
        return FP32 * (counted[strategy] * (group - 1) / group + between)
    return FP32 * counted[strategy] * (gpus - 1) / gpus


def step_bytes(
    stage: str, strategy: str, shape: Shape, load: Load, passes: int, gpus: int
) -> float:
    """Bytes that each device sends in a step of a stage; to sample, PPO gathers weights once.

    For vLLM it gathers the policy's, in bf16, and later both models' in as many forward passes.
    """
    sizes = sizes_of(stage, shape, load)
    moved = communication_bytes(strategy, sizes, passes, gpus, load.group)
    if stage != "ppo" or strategy not in WHOLE_WHILE_SAMPLING:
        return moved
    parts = _parts(strategy, load, gpus)
    gathered = FP32 * sizes.trained
    if _stays_sharded(strategy, load):
        read = FP32 * sizes.outside + BF16 * (sizes.trained - sizes.outside)
        gathered = BF16 * shape.parameters + passes * read
    return moved + gathered * (parts - 1) / parts


def _stays_sharded(strategy: str, load: Load) -> bool:
    """Whether sampling gathers no model."""
    return strategy == "FSDP" and load.vllm > 0


def step_seconds(
    stage: str,
    strategy: str,
    shape: Shape,
    load: Load,
    passes: int,
    gpus: int,
    speed: Speed,
) -> float:
    """Seconds of a step's forward and backward passes, and of its traffic, one after the other.

    6 operations for each parameter and token, 8 with gradient checkpointing; sampling is not
    counted.
    """
    trained = sizes_of(stage, shape, load).trained
    operations = (8 if load.checkpointing else 6) * trained * load.length * load.batch * passes
    moved = step_bytes(stage, strategy, shape, load, passes, gpus)
    return operations / (speed.tflops * 1e12) + moved / (speed.network * 1e9)


def tensor_parallel_bytes(shape: Shape, load: Load, processes: int) -> float:
    """Bytes in each of `processes` that train one reward model by tensor parallelism."""
    return stage_bytes("reward", "DDP", tensor_parallel_shape(shape, processes), load, 1)


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


def tensor_parallel_advice(shape: Shape, load: Load, passes: int, processes: int) -> str:
    """What a reward model takes in each of `processes` under tensor parallelism."""
    held = tensor_parallel_bytes(shape, load, processes) / GIB
    sent = tensor_parallel_traffic(shape, load, passes, processes) / GIB
    return (
        f"reward: --parallel.tensor-parallel {processes} holds {held:,.2f} GiB in each process, "
        f"which sends {sent:,.2f} GiB in one step."
    )


def computing_bytes(stage: str, shape: Shape, load: Load) -> dict[str, float]:
    """Activations, logits, keys and values of each phase of a stage, which no strategy shards."""
    counted = ("activations", "logits", "keys and values", "one layer", "vLLM")
    return {
        phase: sum(item.size for item in items if any(word in item.what for word in counted))
        for phase, items in _plan(stage, shape, load).phases.items()
    }


def sizes_of(stage: str, shape: Shape, load: Load) -> Sizes:
    """The models of a stage: reward trains one, reference runs one, PPO trains two and runs one."""
    adapters = float(load.lora_rank * shape.lora_rows)
    layer = shape.trunk_linear / shape.layers
    embeddings = (shape.vocabulary + 1) * shape.hidden  # and the last norm
    head = shape.parameters - shape.trunk  # 0 where it is the embeddings
    matrix = shape.vocabulary * shape.hidden
    own = matrix if head else 0  # embeddings that are the output matrix belong to the rest
    if stage == "reference":
        matrices = 2 * own
        outside = embeddings + head
        return Sizes(0, shape.parameters, 0, layer, outside, matrices, own)
    if stage == "reward":
        outside = embeddings + shape.hidden
        return Sizes(shape.reward_parameters, 0, adapters, layer, outside, matrix, matrix)
    both = shape.parameters + shape.reward_parameters
    outside = 2 * embeddings + head + shape.hidden
    matrices = matrix + 2 * own
    return Sizes(both, shape.reward_parameters, 2 * adapters, layer, outside, matrices, matrix, own)


def _parts(strategy: str, load: Load, gpus: int) -> int:
    """Over how many devices one copy is sharded."""
    return load.group if strategy == "FSDP" and load.group else gpus


def _plan(stage: str, shape: Shape, load: Load, roles: Roles | None = None, gpus: int = 1) -> Plan:
    if stage == "reward":
        computing = Pass(load.batch * load.length, load.length, load.checkpointing)
        return reward_plan(shape, computing, bf16=True)
    prompt = load.length // 2
    sampled = SampleBatch(load.batch, prompt, load.length - prompt)
    if stage == "reference":
        return reference_plan(shape, None, sampled, bf16=True, vllm=load.vllm)
    return ppo_plan(
        shape,
        shape,
        PPOBatch(sampled, load.batch),
        bf16=True,
        checkpointing=load.checkpointing,
        roles=roles or Roles(vllm=load.vllm, engine_sleeps=True),
        layout=Layout(processes=gpus),
    )


def stage_bytes(stage: str, strategy: str, shape: Shape, load: Load, gpus: int) -> float:
    """Bytes on each of `gpus` devices for a stage (reward, reference or ppo) under a strategy."""
    if stage == "ppo" and strategy == "LoRA":
        roles = Roles(lora_rank=load.lora_rank, share_base=True, vllm=load.vllm, engine_sleeps=True)
        return _plan(stage, shape, load, roles, gpus).peak
    return max(phase_bytes(stage, strategy, shape, load, gpus).values())


def phase_bytes(stage: str, strategy: str, shape: Shape, load: Load, gpus: int) -> dict[str, float]:
    """Bytes on each of `gpus` devices in every phase of a stage that trains no adapters."""
    if stage == "reference" and not _stays_sharded(strategy, load):
        strategy, load = "DDP", replace(load, vllm=min(load.vllm, 1))  # whole in every process
    sizes, parts = sizes_of(stage, shape, load), _parts(strategy, load, gpus)
    needs = computing_bytes(stage, shape, load)
    if stage != "reward" and gpus > 1 and _stays_sharded(strategy, load):
        is_original = stage == "reference"
        read = "scoring" if is_original else "measuring the KL"
        needs[read] = reading_bytes(sizes, needs[read], bf16=not is_original)
        if not is_original:
            needs["sampling"] += BF16 * sizes.matrix  # the largest weight on its way to vLLM
            needs["auditing"] += reading_bytes(sizes, FP32 * shape.parameters / parts, bf16=False)
    elif stage == "ppo" and gpus > 1 and strategy in WHOLE_WHILE_SAMPLING:
        needs["sampling"] += FP32 * sizes.trained
    if strategy == "ZeRO-3" and "stepping" in needs:
        needs["stepping"] += FP32 * sizes.trained / parts
    if "computing gradients" in needs:
        needs["computing gradients"] = passing_bytes(
            strategy, sizes, parts, needs["computing gradients"]
        )
    state = state_bytes(strategy, sizes, parts)
    if stage == "reference" and load.vllm:
        state += engine_bytes(shape, load)
    return {phase: state + need for phase, need in needs.items()}


def engine_bytes(shape: Shape, load: Load) -> float:
    """What a device's part of vLLM holds."""
    prompt = load.length // 2
    batch = SampleBatch(load.batch, prompt, load.length - prompt)
    return sum(item.size for item in vllm_items(shape, batch, load.vllm, bf16=True))
