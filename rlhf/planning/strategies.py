"""Ways to spread a training over N devices, compared by what each device holds.

Bytes of weights, gradients and optimizer on each of N devices while gradients are computed, as
`--sharding` does it with bf16 (LoRA: `--adapter lora`; bf16-weights: `--precision bf16-weights`).

Letters: P trained parameters, C of them in matrices that autocast multiplies; F frozen ones; A of
LoRA adapters; G of one layer; E outside of layers, M of them in matrices that FSDP gathers one by
one (embeddings, and output matrices of their own).

    DDP                 16·P + 2·C + 4·F    float32 weights, gradients, Adam's two moments; bf16
                                            copies
    DDP bf16-weights    16·P + 4·F          bf16 weights and gradients; float32 masters and moments
    ZeRO-1    8·P + 12·P/N + 2·C + 4·F      float32 weights, gradients, bf16 copies; what Adam works
                                            on (weights again, two moments) sharded
    ZeRO-2    4·P + 16·P/N + 2·C + 4·F      gradients sharded too
    ZeRO-3    (20·P + 4·F)/N + 4·R + 8·K    weights sharded too; R of them gathered, without bf16
                                            copies; K gradients being sent, twice; while stepping
                                            all gradients a second time, 4·P/N
    FSDP      (16·P + 4·F)/N + 8·G          no second copy of the weights; layers gathered in bf16:
              + 4·(E − M)                   the one at work, the next, one's gradients; the rest
                                            whole
    FSDP bf16-weights                       matrices and the rest are gathered in bf16, too
    LoRA      2·P + 18·A                    frozen bf16 weights; only adapters are trained

The ZeRO lines are those of arXiv 1910.02054, section 5, with float32 in the place of 16 bits. K is
BUCKET of rlhf/parallel/settings.py; R is REUSED: weights that DeepSpeed keeps gathered because they
are reused soon. Neither is more than P.

Every stage:
* Gradients exist until the optimizer has stepped; in DDP's buckets, always.
* bf16 copies exist during every forward pass, including sampling (without vLLM) and scoring.
* ZeRO-3 loads the full weights before sharding.
* FSDP in groups (`--parallel.shard-group`) divides by the size of a group instead of N.
* `--parallel.reduce-dtype bf16` is not counted: FSDP then needs less than is planned.

FSDP, where a matrix or the rest is larger than layers and activations:
* The peak is when their gradients are sent: 12 bytes for each of those parameters, their gradients
  and the copy for communication.
* At PPO's output matrix it is 16 bytes, as the matrix was gathered again just before, beside the
  activations of the policy alone.

PPO:
* While it samples under ZeRO-3 or FSDP, every device also holds the whole policy, 4 bytes per
  parameter, and copies of its matrices; with bf16 weights 2 bytes.
* With FSDP and vLLM it holds its part of vLLM's bf16 weights and pages instead.
* To measure, FSDP gathers a layer at a time, ZeRO-3 policy and critic.
* In an update FSDP gathers a layer of the policy or of the critic, never of both.
* Audits load the original model in float32: 4 bytes per parameter, sharded only under FSDP.
* LoRA is one model with `--lora.share-base`, as in rlhf/planning/ppo_plan.py.

Reference outputs: each device holds the whole model, unless vLLM samples under FSDP.
"""

from dataclasses import dataclass, replace

from rlhf.parallel.settings import BUCKET, SHARDED, MemoryKind, ReduceDtype, Strategy
from rlhf.planning.plan import (
    KL_ROWS,
    MemoryPhase,
    Pass,
    Plan,
    PPOBatch,
    SampleBatch,
    ShardLayout,
    count_rows,
    shard_plan,
    with_whole_gradient,
)
from rlhf.planning.planner import BF16, FP32, Shape, tensor_parallel_shape
from rlhf.planning.ppo_plan import Roles, bytes_at_output, ppo_plan
from rlhf.planning.sampling_plan import reference_plan
from rlhf.planning.training_plan import reward_plan

FORWARD_PHASES = (MemoryPhase.READING, MemoryPhase.MEASURING_KL)
AUDITS = (MemoryPhase.AUDITING, MemoryPhase.AUDITING_IN_TRAINING)
BACKWARD_PHASES = (MemoryPhase.GRADIENTS, MemoryPhase.GRADIENTS_OF_TEXTS)
REUSED = 10**9  # weights: DeepSpeed's stage3_max_reuse_distance, as it comes
USABLE = 0.9


@dataclass(frozen=True)
class Option:
    """One way to spread a training, a row of `rlhf plan`.

    Attributes:
        name: in tables and advice.
        strategy: of `--sharding`.
        bf16_weights: with `--precision bf16-weights`.
        lora: adapters are trained.
    """

    name: str
    strategy: Strategy = "ddp"
    bf16_weights: bool = False
    lora: bool = False

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP shards."""
        return self.strategy == "fsdp"

    @property
    def shards_weights(self) -> bool:
        """Whether each device holds only a part of the weights."""
        return MemoryKind.WEIGHTS in SHARDED[self.strategy]


DDP = Option("DDP")
DDP_BF16_WEIGHTS = Option("DDP bf16-weights", bf16_weights=True)
ZERO1, ZERO2, ZERO3 = (
    Option("ZeRO-1", "zero1"),
    Option("ZeRO-2", "zero2"),
    Option("ZeRO-3", "zero3"),
)
FSDP = Option("FSDP", "fsdp")
FSDP_BF16_WEIGHTS = Option("FSDP bf16-weights", "fsdp", bf16_weights=True)
LORA = Option("LoRA", lora=True)
OPTIONS = (DDP, DDP_BF16_WEIGHTS, ZERO1, ZERO2, ZERO3, FSDP, FSDP_BF16_WEIGHTS, LORA)


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
        kl_rows: reference outputs that PPO's policy reads in an update for each sequence; of a
            prompt one is sampled.
        reduce_dtype: as `--parallel.reduce-dtype`, in which gradients are added up.
    """

    length: int
    batch: int
    checkpointing: bool
    lora_rank: int
    group: int | None = None
    vllm: int = 0
    kl_rows: float = KL_ROWS
    reduce_dtype: ReduceDtype = "fp32"

    @property
    def ppo_batch(self) -> PPOBatch:
        """What PPO reads at one time; half of a sequence is the prompt."""
        prompt = self.length // 2
        sampled = SampleBatch(self.batch, prompt, self.length - prompt)
        rows = count_rows(self.batch, self.kl_rows) if self.kl_rows else 0
        return PPOBatch(sampled, self.batch, rows)


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


def passing_bytes(
    option: Option,
    sizes: Sizes,
    gpus: int,
    activation_bytes: float,
    at_output: float = 0.0,
    layers: int = BF16,
) -> float:
    """Bytes at the peak of a pass on top of the state: gathered weights, and what is computed.

    `activation_bytes`: activations and logits, which no option shards; `at_output`: those that are
    there at the policy's output matrix. A parameter of layers is gathered in `layers` bytes.
    """
    if gpus == 1:
        return activation_bytes
    if option.strategy == "zero3":
        gathered, moved = min(REUSED, sizes.trained), min(BUCKET, sizes.trained)
        return activation_bytes + FP32 * (gathered + 2 * moved)
    if option.is_fsdp:
        of_layers = (3 * layers + layers) * sizes.layer
        rest = sizes.outside - sizes.matrices
        ends = BF16 if option.bf16_weights else FP32
        # the policy's output matrix is there with the buffer that it was gathered in, its gradients
        # and their copy
        output = (3 * ends + FP32) * sizes.output
        with_output = at_output + of_layers + output if output else 0.0
        at_ends = max((2 * ends + FP32) * sizes.matrix, (ends + FP32) * rest)
        return ends * rest + max(activation_bytes + of_layers, with_output, at_ends)
    return activation_bytes


def reading_bytes(
    sizes: Sizes,
    activation_bytes: float,
    *,
    layers: int = BF16,
    ends: int = FP32,
    copied: float = 0.0,
) -> float:
    """Bytes at the peak of a forward pass alone under FSDP.

    A layer or matrix takes twice its size: itself, and the buffer that it was gathered in. On top
    comes the larger of the previous one's buffer (while this one is gathered) and what it computes
    (afterwards). A parameter of layers is gathered in `layers` bytes, one of matrices and the rest,
    which stays, in `ends`. `copied`: the bytes of copies that autocast keeps.
    """
    rest = sizes.outside - sizes.matrices
    parts = (layers * sizes.layer, ends * sizes.matrix)
    return copied + ends * rest + max(2 * part + max(part, activation_bytes) for part in parts)


def options_for(gpus: int) -> tuple[Option, ...]:
    """Those that so many devices can follow: one has nothing to shard with."""
    return tuple(option for option in OPTIONS if gpus > 1 or option.strategy == "ddp")


def reads_sharded(stage: str, option: Option, load: Load) -> bool:
    """Whether a stage reads its models a layer at a time and never gathers one to do so."""
    return option.is_fsdp and (stage == "ppo" or load.vllm > 0)


def tensor_parallel_bytes(shape: Shape, load: Load, processes: int) -> float:
    """Bytes in each of `processes` that train one reward model by tensor parallelism."""
    plan = plan_of("reward", DDP, tensor_parallel_shape(shape, processes), load, 1)
    return with_whole_gradient(plan, shape.embedding_bytes).peak


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
    return replace(
        sizes_of_policy_and_critic(shape, shape),
        frozen=shape.reward_parameters,
        adapters=2 * adapters,
    )


def sizes_of_policy_and_critic(shape: Shape, critic: Shape | None) -> Sizes:
    """A policy and a critic of all weights, which PPO trains; None: the policy alone."""
    embeddings = shape.vocabulary * shape.hidden
    head = shape.parameters - shape.trunk
    own = embeddings if head else 0  # else they are in the rest
    policy = Sizes(
        trained=shape.parameters,
        layer=shape.trunk_linear / shape.layers,
        outside=embeddings + shape.hidden + head,
        matrices=2 * own,
        matrix=own,
        output=own,
    )
    if critic is None:
        return policy
    matrix = critic.vocabulary * critic.hidden
    return replace(
        policy,
        trained=policy.trained + critic.reward_parameters,
        layer=max(policy.layer, critic.trunk_linear / critic.layers),
        outside=policy.outside + matrix + 2 * critic.hidden,  # its last norm, and the head
        matrices=policy.matrices + matrix,
        matrix=max(own, matrix),
    )


def parts_of(option: Option, load: Load, gpus: int) -> int:
    """Over how many devices one copy is sharded."""
    return load.group if option.is_fsdp and load.group else gpus


def plan_of(stage: str, option: Option, shape: Shape, load: Load, gpus: int) -> Plan:
    """What each of `gpus` devices holds; of weights that FSDP or ZeRO-3 gathers, whole models."""
    layout = ShardLayout(
        option.strategy,
        parts_of(option, load, gpus),
        processes=gpus,
        bf16_weights=option.bf16_weights,
    )
    if stage == "reward":
        tokens, rounded = load.batch * load.length, layout.bf16_weights
        one_pass = Pass(tokens, load.length, load.checkpointing, rounded)
        plan = reward_plan(
            shape,
            one_pass,
            bf16=True,
            has_stepped_copy=layout.strategy.startswith("zero"),
            adapter="lora" if option.lora else "none",
            lora_rank=load.lora_rank,
            has_masters=layout.has_masters,
        )
        return shard_plan(plan, layout)
    batch = load.ppo_batch
    if stage == "reference":
        shards = layout if reads_sharded(stage, option, load) else None
        vllm = load.vllm if shards else min(load.vllm, 1)  # else each process has its own
        return reference_plan(shape, None, batch.sampled, bf16=True, layout=shards, vllm=vllm)
    return ppo_plan(
        shape,
        shape,
        batch,
        bf16=True,
        checkpointing=load.checkpointing,
        roles=Roles(
            lora_rank=load.lora_rank if option.lora else 0,
            share_base=option.lora,
            vllm=load.vllm,
            engine_sleeps=True,
        ),
        layout=layout,
    )


def stage_bytes(stage: str, option: Option, shape: Shape, load: Load, gpus: int) -> float:
    """Bytes on each of `gpus` devices for a stage (reward, reference or ppo) under an option."""
    return max(phase_bytes(stage, option, shape, load, gpus).values())


def phase_bytes(
    stage: str, option: Option, shape: Shape, load: Load, gpus: int
) -> dict[MemoryPhase, float]:
    """Bytes on each of `gpus` devices in every phase of a stage."""
    plan = plan_of(stage, option, shape, load, gpus)
    held = sum(item.size for item in plan.always)
    sizes, parts = sizes_of(stage, shape, load), parts_of(option, load, gpus)
    pass_settings = {"checkpointing": load.checkpointing, "bf16_weights": option.bf16_weights}
    at_output = bytes_at_output(shape, load.ppo_batch, bf16=True, **pass_settings)
    phases = {}
    for phase, items in plan.phases.items():
        activations = sum(item.size for item in items if item.state is MemoryKind.ACTIVATIONS)
        state = sum(item.size for item in items) - activations
        needs = activations
        if stage != "reference":
            needs = gathered_bytes(phase, option, sizes, parts, activations, at_output=at_output)
        elif parts > 1 and reads_sharded(stage, option, load):
            needs = reading_bytes(sizes, activations, layers=FP32)
        phases[phase] = held + state + needs
    if plan.loading:
        phases[MemoryPhase.LOADING] = sum(item.size for item in plan.loading)
    return phases


def gathered_bytes(
    phase: MemoryPhase,
    option: Option,
    sizes: Sizes,
    parts: int,
    activation_bytes: float,
    *,
    at_output: float,
    bf16: bool = True,
) -> float:
    """What is computed in a phase of a training, and the parts of models gathered for it.

    `at_output` is for the phase that computes gradients, as in `passing_bytes`.
    """
    layers = BF16 if bf16 else FP32
    if phase in BACKWARD_PHASES:
        there = at_output if phase is MemoryPhase.GRADIENTS else activation_bytes
        return passing_bytes(option, sizes, parts, activation_bytes, there, layers)
    if phase is MemoryPhase.STEPPING and option.strategy == "zero3":
        return activation_bytes + FP32 * sizes.trained / parts
    if parts == 1 or not option.is_fsdp:
        return activation_bytes
    if phase in AUDITS:  # of the original model, in float32
        return reading_bytes(sizes, activation_bytes, layers=FP32)
    if phase in FORWARD_PHASES:
        ends = BF16 if option.bf16_weights else FP32
        # of the policy's output matrix, by autocast
        copied = BF16 * sizes.matrix if bf16 and ends == FP32 else 0
        return reading_bytes(sizes, activation_bytes, layers=layers, ends=ends, copied=copied)
    return activation_bytes
