"""How much memory PPO needs in each process, by what has its own weights and what is sharded.

    policy          all weights, or LoRA adapters beside frozen ones
    critic          a separate model, trained whole or its head alone; a head on the policy; none
    reward models   frozen
    reference       in memory with `--kl.source resident`; loaded for audits unless the policy is
                    the reference with adapters
    --lora.share-base   one frozen model under policy, critic and reward models, their adapters

`--sharding` over N processes shards the optimizer (zero1), gradients too (zero2), and weights too
(zero3, fsdp). The policy is gathered while PPO samples, unless vLLM does under fsdp. Under zero3
policy and critic are gathered to measure a rollout and the KL. What is offloaded is in main memory.

Log-probs are computed before values, so the backward pass begins with the critic, whose activations
are gone when the policy's turn comes: layers of both are never at work, nor gathered, at once.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rlhf.modeling.log_probs import SCORE_BATCH
from rlhf.parallel.settings import SHARDED, MemoryKind
from rlhf.planning.plan import (
    Item,
    MemoryPhase,
    Pass,
    Plan,
    PPOBatch,
    SampleBatch,
    ShardLayout,
    whole_weights,
)
from rlhf.planning.planner import (
    BF16,
    FP32,
    Shape,
    at_work_bytes,
    block_bytes,
    copies,
    frozen_item,
    frozen_precision,
    kept_bytes,
    packed_bytes,
    part_of_vocabulary,
    stepped_item,
    stepping_items,
    working_bytes,
)
from rlhf.planning.sampling_plan import sampling_items, vllm_at_work, vllm_items

Critic = Literal["own", "own head", "head", "none"]


@dataclass(frozen=True)
class Roles:
    """What PPO holds.

    Attributes:
        critic: `own`, trained whole; `own head`, on a frozen trunk; `head`, on the policy; `none`.
        reward_models: how many that read tokens; functions and endpoints do not count.
        encoder_parameters: of reward models that read text pairs, whole in every process.
        lora_rank: of the adapters; 0 where all weights are trained.
        share_base: one frozen model under all roles.
        four_bits: it is held in 4 bits.
        resident: the original model stays in memory.
        audited_rows: rows that it reads at once in audits during training; 0: no such audits.
        vllm: processes that share a vLLM, which samples with its own copy of the policy; 0: none.
        engine_sleeps: vLLM frees its memory between batches, as it does on GPUs.
        reward_ranks: of the reward models' adapters on a shared base; by default `lora_rank`.
    """

    critic: Critic = "own"
    reward_models: int = 1
    encoder_parameters: int = 0
    lora_rank: int = 0
    share_base: bool = False
    four_bits: bool = False
    resident: bool = False
    audited_rows: int = 0
    vllm: int = 0
    engine_sleeps: bool = False
    reward_ranks: tuple[int, ...] = ()

    @property
    def reward_adapter_ranks(self) -> tuple[int, ...]:
        """Of each reward model's adapters."""
        return self.reward_ranks or (self.lora_rank,) * self.reward_models

    @property
    def critic_rank(self) -> int:
        """Of the critic's adapters, which start as the first reward model's."""
        return next(iter(self.reward_adapter_ranks), self.lora_rank)


def trained_parameters(shape: Shape, reward: Shape, roles: Roles) -> dict[str, int]:
    """Parameters that are trained, by role."""
    policy = roles.lora_rank * shape.lora_rows or shape.parameters
    own = roles.critic_rank * reward.lora_rows + reward.hidden if roles.share_base else None
    critic = {
        "own": reward.reward_parameters if own is None else own,
        "own head": reward.hidden,
        "head": shape.hidden,
        "none": 0,
    }[roles.critic]
    return {"policy": policy, "critic": critic}


def ppo_plan(
    shape: Shape,
    reward: Shape,
    batch: PPOBatch,
    *,
    bf16: bool,
    checkpointing: bool = False,
    roles: Roles | None = None,
    layout: ShardLayout | None = None,
) -> Plan:
    """PPO: policy and critic are trained, the reward model is frozen.

    Args:
        shape: the policy.
        reward: the reward model, and the critic that starts as its copy.
        batch: how much is read at one time.
        bf16: autocast.
        checkpointing: activations are computed again in the backward pass.
        roles: what has its own weights; by default policy, critic and one reward model.
        layout: what is sharded; by default nothing, in one process.
    """
    roles, layout, sampled = roles or Roles(), layout or ShardLayout(), batch.sampled
    rank = roles.lora_rank * (not roles.four_bits)  # on 4 bits they are merged
    engine = vllm_items(shape, sampled, roles.vllm, bf16=bf16, lora_rank=rank)
    counts = trained_parameters(shape, reward, roles)
    rounded = _rounded(counts, reward, roles) if layout.has_masters else {}
    gradients, *more = _stepping(counts, rounded, shape, layout)
    # DDP holds them in its buckets at all times.
    always = (gradients,) if layout.processes > 1 and not SHARDED[layout.strategy] else ()
    temporary = () if always else (gradients,)
    multiplied = 0 if layout.shards_weights else _multiplied(shape, reward, roles, layout)
    learning = (*temporary, *copies(multiplied, bf16=bf16))
    # a shared base is bf16, and so is what passes from layer to layer
    one_pass = Pass(0, 0, checkpointing, layout.bf16_weights or (roles.share_base and bf16))
    updating = (
        *learning,
        *_update(shape, reward, batch, roles, one_pass, bf16=bf16),
        *_kept(reward, roles, batch.rollout, sampled.new),
    )
    read = _pretraining(shape, reward, batch, roles, one_pass, bf16=bf16)
    held = (
        *_frozen(shape, reward, roles, layout, bf16=bf16),
        *(() if roles.engine_sleeps else engine),
        *_trained(counts, rounded, layout),
    )
    return Plan(
        f"Memory of each process for PPO, with prompts of {sampled.prompt} tokens",
        (*map(layout.on_device, held), *always),
        {
            MemoryPhase.SAMPLING: _sampling(shape, sampled, roles, layout, bf16=bf16)
            + (engine if roles.engine_sleeps else ()),
            **_reading(shape, reward, batch, roles, layout, bf16=bf16),
            **_auditing(shape, reward, batch, roles, layout, bf16=bf16),
            MemoryPhase.GRADIENTS: updating,
            **({MemoryPhase.GRADIENTS_OF_TEXTS: (*learning, *read)} if read else {}),
            MemoryPhase.STEPPING: (*temporary, *more),
        },
        whole_weights(layout, _whole_bytes(shape, reward, roles, layout)),
    )


def _pretraining(
    shape: Shape, reward: Shape, batch: PPOBatch, roles: Roles, one_pass: Pass, *, bf16: bool
) -> tuple[Item, ...]:
    """A forward and a backward pass of the policy over pretraining texts, if there are any."""
    rows, length = batch.texts
    if not rows:
        return ()
    texts = replace(batch, sampled=SampleBatch(0, 1, length - 1), episodes=rows, reference_rows=0)
    policy_alone = replace(roles, critic="none")
    return _update(shape, reward, texts, policy_alone, one_pass, bf16=bf16)


def _update(
    shape: Shape, reward: Shape, batch: PPOBatch, roles: Roles, one_pass: Pass, *, bf16: bool
) -> tuple[Item, ...]:
    """What is computed at the peak of a forward and backward pass; `one_pass` says how.

    The policy's activations, and the largest of what comes after them: the critic's with a layer of
    its own at work, the logits, a layer of the policy. Of a frozen trunk nothing is read here.
    """
    length, new = batch.sampled.length, batch.sampled.new
    rows = batch.episodes + batch.reference_rows
    of_policy = replace(one_pass, tokens=rows * length, length=length, lora_rank=roles.lora_rank)
    tokens = f"{rows} × {length} tokens"
    positions = f"{rows} × {new} positions, {part_of_vocabulary(shape)}"
    layer_of_policy = at_work_bytes(shape, of_policy, bf16=bf16, padded=True)
    moments: list[tuple[Item, ...]] = [
        (Item("logits", block_bytes(shape, rows * new, backward=True), positions),),
        (Item("policy: layer at work", layer_of_policy, tokens),),
    ]
    if roles.critic == "own":
        rank = roles.critic_rank if roles.share_base else 0
        of_critic = replace(of_policy, tokens=batch.episodes * length, lora_rank=rank)
        tokens_of_critic = f"{batch.episodes} × {length} tokens"
        activations = kept_bytes(reward, of_critic, bf16=bf16, padded=True)
        layer_of_critic = at_work_bytes(reward, of_critic, bf16=bf16, padded=True)
        logits_held = float(FP32 * shape.vocabulary * rows * new * shape.whole_logits)
        critic = [
            Item("critic: activations", activations, tokens_of_critic),
            Item("critic: layer at work", layer_of_critic, tokens_of_critic),
            Item("logits", logits_held, positions),
        ]
        moments.append(tuple(item for item in critic if item.size))
    kept = kept_bytes(shape, of_policy, bf16=bf16, padded=True)
    largest = max(moments, key=lambda items: sum(item.size for item in items))
    return (Item("policy: activations", kept, tokens), *largest)


def bytes_at_output(
    shape: Shape, batch: PPOBatch, *, bf16: bool, checkpointing: bool, bf16_weights: bool
) -> float:
    """Bytes of what is computed when the backward pass is at the policy's output matrix."""
    rows, length = batch.episodes + batch.reference_rows, batch.sampled.length
    one_pass = Pass(rows * length, length, checkpointing, bf16_weights)
    kept = kept_bytes(shape, one_pass, bf16=bf16, padded=True)
    return kept + block_bytes(shape, rows * batch.sampled.new, backward=True)


def _kept(reward: Shape, roles: Roles, episodes: int, new: int) -> tuple[Item, ...]:
    """What a head on a frozen model reads, once for the updates of a step."""
    if roles.critic != "own head" or not episodes:
        return ()
    size = float(FP32 * episodes * new * reward.hidden)
    return (Item("critic: what its head reads", size, f"{episodes} × {new} tokens"),)


def _sampling(
    shape: Shape, batch: SampleBatch, roles: Roles, layout: ShardLayout, *, bf16: bool
) -> tuple[Item, ...]:
    matrices = 0 if layout.bf16_weights else roles.lora_rank * shape.lora_rows or shape.linear
    if roles.vllm:
        gathers, merges = layout.shards_weights, roles.four_bits or not bf16
        adapters = {"has_adapters": bool(roles.lora_rank), "merges": merges}
        sampling: tuple[Item, ...] = vllm_at_work(
            shape, batch, roles.vllm, bf16=bf16, is_gathered=gathers, **adapters
        )
    else:
        sampling = sampling_items(shape, batch, bf16=bf16, trained=matrices)
    if not layout.shards_weights or (roles.vllm and layout.strategy == "fsdp"):
        return sampling
    size = BF16 if layout.bf16_weights else FP32
    gathered = shape.parameters + roles.lora_rank * shape.lora_rows
    whole = Item("whole weights", float(size * gathered), "of the policy, gathered")
    return (whole, *sampling)


def _gathered(shape: Shape, reward: Shape, roles: Roles, layout: ShardLayout) -> tuple[Item, ...]:
    """Sharded weights, gathered to measure with."""
    if not layout.shards_weights or layout.reads_sharded:
        return ()
    held = _whole_bytes(shape, reward, roles, layout)
    return (Item("whole weights", held, "of policy and critic, gathered"),)


def _whole_bytes(shape: Shape, reward: Shape, roles: Roles, layout: ShardLayout) -> float:
    """Bytes of policy and critic: float32, but for bf16 weights that are trained."""
    size = BF16 if layout.bf16_weights else FP32
    critic = {"own": size, "own head": FP32}.get(roles.critic, 0)
    policy = shape.parameters + roles.lora_rank * shape.lora_rows
    return float(size * policy + critic * reward.trunk)


def _rounded(counts: dict[str, int], reward: Shape, roles: Roles) -> dict[str, int]:
    """Trained parameters that have masters, by role: all but those of heads."""
    critic = {"critic": counts["critic"] - reward.hidden} if roles.critic == "own" else {}
    return {"policy": counts["policy"], **critic}


def _auditing(
    shape: Shape, reward: Shape, batch: PPOBatch, roles: Roles, layout: ShardLayout, *, bf16: bool
) -> dict[MemoryPhase, tuple[Item, ...]]:
    """The phases that measure KLs: the policy reads answers, and so does the original model.

    It is loaded after training, when no weights are gathered, and for audits during training.
    """
    gathered = _gathered(shape, reward, roles, layout)
    matrices = copies(roles.lora_rank * shape.lora_rows or shape.linear, bf16=bf16)
    if layout.reads_sharded or layout.bf16_weights:
        matrices = []  # layers are gathered in bf16, one at a time, or all weights are bf16
    reads = _forward_pass(shape, SCORE_BATCH, batch.sampled, bf16=bf16)
    phases = {MemoryPhase.MEASURING_KL: (*gathered, *matrices, *reads)}
    if roles.lora_rank and not roles.four_bits:
        return phases  # the original model lies beneath the adapters
    size = float(FP32 * shape.parameters)
    if layout.reads_sharded:
        size = layout.held(MemoryKind.WEIGHTS, size)
    loaded = Item("loaded reference: weights", size, "float32")
    phases[MemoryPhase.AUDITING] = (loaded, *reads)
    if roles.audited_rows:
        reads = _forward_pass(shape, roles.audited_rows, batch.sampled, bf16=bf16)
        phases[MemoryPhase.AUDITING_IN_TRAINING] = (*gathered, loaded, *reads)
    return phases


def _reading(
    shape: Shape, reward: Shape, batch: PPOBatch, roles: Roles, layout: ShardLayout, *, bf16: bool
) -> dict[MemoryPhase, tuple[Item, ...]]:
    """The phase in which policy and critic read a rollout, one after the other."""
    matrices = copies(_multiplied(shape, reward, roles, layout), bf16=bf16)
    if layout.reads_sharded:
        matrices = []  # layers are gathered in bf16, one at a time
    reads = _forward_pass(shape, batch.episodes, batch.sampled, bf16=bf16)
    gathered = _gathered(shape, reward, roles, layout)
    return {MemoryPhase.READING: (*gathered, *matrices, *reads)}


def _forward_pass(shape: Shape, rows: int, sampled: SampleBatch, *, bf16: bool) -> tuple[Item, ...]:
    """What is computed where nothing is kept for a backward pass."""
    new, length = sampled.new, sampled.length
    working = working_bytes(shape, rows * length, length, bf16=bf16)
    logits, part = block_bytes(shape, rows * new), part_of_vocabulary(shape)
    return (
        Item("one layer", working, f"{rows} × {length} tokens"),
        Item("logits", logits, f"{rows} × {new} positions, {part}"),
    )


def _multiplied(shape: Shape, reward: Shape, roles: Roles, layout: ShardLayout) -> int:
    """Trained parameters that autocast multiplies in bf16, and keeps copies of."""
    if layout.bf16_weights:
        return 0
    policy = roles.lora_rank * shape.lora_rows or shape.linear
    critic = roles.critic_rank * reward.lora_rows if roles.share_base else reward.trunk_linear
    return policy + critic if roles.critic == "own" else policy


def _stepping(
    counts: dict[str, int], rounded: dict[str, int], shape: Shape, layout: ShardLayout
) -> list[Item]:
    """Gradients, and what else a step needs."""
    needed = stepping_items(sum(counts.values()), sum(rounded.values()), shape)
    return [layout.on_device(item) for item in needed]


def _trained(counts: dict[str, int], rounded: dict[str, int], layout: ShardLayout) -> list[Item]:
    items = []
    for name, count in ((name, count) for name, count in counts.items() if count):
        size = FP32 * count
        if name in rounded:
            held = BF16 * rounded[name]
            items.append(Item(f"{name}: weights", held, "bf16, trained", MemoryKind.WEIGHTS))
            items.append(Item(f"{name}: masters", size, "float32", MemoryKind.OPTIMIZER))
        else:
            items.append(Item(f"{name}: weights", size, "float32, trained", MemoryKind.WEIGHTS))
        items.append(Item(f"{name}: Adam", 2 * size, "two moments", MemoryKind.OPTIMIZER))
        if layout.strategy.startswith("zero"):
            items.append(stepped_item(name, count))
    return items


def _frozen(
    shape: Shape, reward: Shape, roles: Roles, layout: ShardLayout, *, bf16: bool
) -> list[Item]:
    """Weights that are not trained."""
    items = []
    if roles.resident:
        size = float(FP32 * shape.parameters)
        if layout.reads_sharded:
            size = layout.held(MemoryKind.WEIGHTS, size)
        items.append(Item("reference model: weights", size, "float32, --kl.source resident"))
    if roles.encoder_parameters:
        size = float(FP32 * roles.encoder_parameters)
        items.append(Item("encoders as reward models: weights", size, "float32, frozen"))
    number = "" if roles.reward_models == 1 else f", {roles.reward_models} of them"
    if roles.share_base:
        each_rank = FP32 * reward.lora_rows
        items.append(_base(shape, roles, bf16=bf16))
        if roles.critic == "own head":
            size = each_rank * roles.critic_rank
            items.append(Item("critic: adapters", size, "frozen"))
        if roles.reward_models:
            size = each_rank * sum(roles.reward_adapter_ranks)
            items.append(Item("reward model: adapters", size, f"frozen{number}"))
        return items
    if roles.lora_rank:
        items.append(frozen_item("policy", shape.parameters, "frozen weights"))
    if roles.critic == "own head":
        items.append(frozen_item("critic", reward.trunk, "trunk"))
    if roles.reward_models:
        size = FP32 * roles.reward_models * reward.reward_parameters
        why = f"float32, frozen{number}"
        items.append(Item("reward model: weights", size, why, MemoryKind.WEIGHTS))
    return items


def _base(shape: Shape, roles: Roles, *, bf16: bool) -> Item:
    """The one frozen model; in 4 bits its embeddings and output matrix stay as they are."""
    size, precision = frozen_precision(bf16=bf16)
    if not roles.four_bits:
        return Item("shared base: weights", size * shape.parameters, f"{precision}, frozen")
    held = packed_bytes(shape, shape.parameters, size)
    return Item("shared base: weights", held, f"4 bits, frozen; the rest {precision}")
