"""What a PPO run will hold in the memory of each process, before anything is loaded."""

import math
from dataclasses import replace

import torch

from policies.ppo.batches import chunks_per_step
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from policies.reference.store import read_manifest
from policies.rewards import encoder_models, reward_models
from rlhf.config.paths import with_changes
from rlhf.errors import ConfigError
from rlhf.modeling.adapters import adapter_rank
from rlhf.parallel.distributed import choose_precision
from rlhf.parallel.settings import MemoryKind
from rlhf.parallel.sharding import Sharding
from rlhf.planning.plan import (
    GIB,
    Item,
    Plan,
    PPOBatch,
    SampleBatch,
    ShardLayout,
    count_rows,
    rows_in_pass,
    with_whole_gradient,
)
from rlhf.planning.planner import read_shape, tensor_parallel_shape
from rlhf.planning.ppo_plan import Critic, Roles, bytes_at_output, ppo_plan, trained_parameters
from rlhf.planning.strategies import Option, Sizes, gathered_bytes, sizes_of_policy_and_critic
from rlhf.ranks import world_size
from rlhf.run.preflight import disk_bytes_of
from rlhf.run.rundir import RunDir

ASSUMED_TOKENS = 256


def plan_memory(settings: PPOSettings) -> str:
    """The plan as a table; with a shared base, the peak without it too.

    On a machine without a GPU vLLM never sleeps, and is planned so; the peak on GPUs is added.

    Raises:
        InputError: a model has no config that can be read.
    """
    critic, roles = _roles(settings)
    text = _plan(settings, critic, roles).text
    if settings.lora.share_base:
        apart = replace(roles, share_base=False, four_bits=False)
        peak = _plan(settings, critic, apart).peak / GIB
        text += f"\nWithout --lora.share-base the peak is {peak:.4g} GiB."
    if roles.vllm and not roles.engine_sleeps:
        peak = _plan(settings, critic, replace(roles, engine_sleeps=True)).peak / GIB
        text += (
            "\nThis machine has no GPU, so vLLM is planned to keep its memory. On GPUs it sleeps "
            f"between batches: the peak is then {peak:.4g} GiB."
        )
    return text


def require_memory(settings: PPOSettings, sharding: Sharding, has: float) -> None:
    """Refuse ZeRO 3 where policy and critic, which it first moves to every device, do not fit.

    Args:
        settings: of the run.
        sharding: as chosen.
        has: bytes of each process's device.

    Raises:
        ConfigError: names both sizes and the sharding that needs no whole copy.
    """
    plan = _plan(with_changes(settings, {"sharding": sharding.strategy}), *_roles(settings))
    needs = sum(item.size for item in plan.loading)
    if needs > has:
        raise ConfigError(
            f"--sharding {sharding.strategy} first moves policy and critic whole to every device: "
            f"{needs / GIB:.1f} GiB in float32; {has / GIB:.1f} GiB are available",
            "Use --sharding fsdp --sampling.engine vllm, with which no process holds a whole "
            "model.",
        )


def checkpoint_disk_bytes(settings: PPOSettings) -> int:
    """Bytes of the checkpoints that are kept, of one more while it is written, and of the policy.

    Raises:
        InputError: a model has no config that can be read.
    """
    critic, roles = _roles(settings)
    policy = read_shape(settings.model)
    trained = sum(trained_parameters(policy, read_shape(critic), roles).values())
    return disk_bytes_of(trained, policy.parameters, settings.checkpoint.keep)


def _roles(settings: PPOSettings) -> tuple[str, Roles]:
    """The model that the critic starts from, and what has weights of its own."""
    models = reward_models(settings.reward)
    roles = Roles(
        critic=_critic(settings),
        reward_models=len(models),
        encoder_parameters=sum(
            read_shape(name).reward_parameters for name in encoder_models(settings.reward)
        ),
        lora_rank=settings.lora.rank or 0,
        share_base=settings.lora.share_base,
        four_bits=settings.lora.four_bit_base,
        resident=settings.kl.source == "resident",
        audited_rows=settings.batch.micro_batch_size if _audits_on_the_way(settings.kl) else 0,
        vllm=settings.sampling.vllm_processes,
        engine_sleeps=torch.cuda.is_available(),
        reward_ranks=tuple(adapter_rank(name) or settings.lora.rank or 0 for name in models),
    )
    return models[0] if models else settings.model, roles


def _audits_on_the_way(kl: KLSettings) -> bool:
    """Whether steps load the original model; other sources measure the reverse KL without."""
    return kl.audit_every is not None and kl.source in ("reference", "none")


def _critic(settings: PPOSettings) -> Critic:
    if not settings.has_critic:
        return "none"
    if settings.critic.model == "head":
        return "head"
    return "own" if settings.critic.trains == "all" else "own head"


def _plan(settings: PPOSettings, critic: str, roles: Roles) -> Plan:
    prompt, new = _lengths(settings)
    processes = max(settings.processes, world_size())
    parts = settings.parallel.shard_group or processes
    tensor_parallel = settings.parallel.tensor_parallel
    if tensor_parallel > 1:
        processes = parts = 1
    rollout = max(1, settings.batch.episodes_per_step // processes)
    episodes, rows = sequences_in_pass(settings, rollout, prompt + new)
    shape = tensor_parallel_shape(read_shape(settings.model), tensor_parallel)
    reward = tensor_parallel_shape(read_shape(critic), tensor_parallel)
    batch = PPOBatch(
        SampleBatch(settings.sampling.batch_size, prompt, new),
        episodes=episodes,
        reference_rows=rows,
        rollout=rollout,
        texts=_texts(settings, processes),
    )
    layout = ShardLayout(
        settings.sharding,
        parts,
        settings.parallel.offload,
        processes,
        bf16_weights=settings.precision == "bf16-weights",
    )
    bf16 = choose_precision(settings.precision) == "bf16"
    checkpointing = settings.batch.gradient_checkpointing
    plan = ppo_plan(
        shape,
        reward,
        batch,
        bf16=bf16,
        checkpointing=checkpointing,
        roles=roles,
        layout=layout,
    )
    if tensor_parallel > 1 and not roles.lora_rank:
        whole = read_shape(settings.model)
        is_tied = whole.parameters == whole.trunk  # embeddings are the output matrix, too
        return with_whole_gradient(plan, whole.embedding_bytes * (2 if is_tied else 1))
    if roles.lora_rank or parts == 1 or not layout.shards_weights:
        return plan  # of models under adapters the parts that are gathered are not counted
    at_output = bytes_at_output(
        shape,
        batch,
        bf16=bf16,
        checkpointing=checkpointing,
        bf16_weights=layout.bf16_weights,
    )
    sizes = sizes_of_policy_and_critic(shape, reward if roles.critic == "own" else None)
    return _add_gathered(plan, layout, sizes, at_output, bf16=bf16)


def _add_gathered(
    plan: Plan, layout: ShardLayout, sizes: Sizes, at_output: float, *, bf16: bool
) -> Plan:
    """A plan with the parts of models that each phase gathers."""
    option = Option("", layout.strategy, layout.bf16_weights)
    why = "layers and embeddings, one after the other, and gradients on their way"
    phases = {}
    for phase, items in plan.phases.items():
        computed = sum(item.size for item in items if item.state is MemoryKind.ACTIVATIONS)
        needs = gathered_bytes(
            phase, option, sizes, layout.parts, computed, at_output=at_output, bf16=bf16
        )
        more = needs - computed
        phases[phase] = (*items, Item("gathered", more, why)) if more else items
    return replace(plan, phases=phases)


def sequences_in_pass(settings: PPOSettings, rollout: int, length: int) -> tuple[int, int]:
    """Episodes of the largest pass, and reference rows beside them.

    Args:
        settings: of the run.
        rollout: episodes of a step in this process.
        length: of the longest sequence, in tokens.
    """
    batch, minibatches = settings.batch, settings.optim.minibatches
    episodes_per_update = math.ceil(rollout / minibatches)
    if batch.micro_tokens:  # reference rows have passes of their own
        return min(episodes_per_update, max(1, batch.micro_tokens // length)), 0
    episodes = min(episodes_per_update, batch.micro_batch_size)
    if settings.kl.source != "reference":
        return episodes, 0
    rows = count_rows(rollout // batch.samples_per_prompt, settings.kl.rows_per_prompt)
    return episodes, rows_in_pass(rows, minibatches, math.ceil(episodes_per_update / episodes))


def _texts(settings: PPOSettings, processes: int) -> tuple[int, int]:
    """Pretraining texts in one pass, and the tokens of each."""
    if settings.ptx.data is None:
        return 0, 0
    length, rows = settings.ptx.length, settings.batch.micro_batch_size
    if settings.batch.micro_tokens:
        rows = max(1, settings.batch.micro_tokens // length)
    chunks = chunks_per_step(settings, processes)
    return min(rows, math.ceil(chunks / settings.optim.minibatches)), length


def _lengths(settings: PPOSettings) -> tuple[int, int]:
    """Tokens of the longest prompt and response; assumed where there is no store yet."""
    reference = RunDir(settings.reference)
    if not reference.is_done:
        return ASSUMED_TOKENS, ASSUMED_TOKENS
    manifest = read_manifest(reference.outputs)
    return manifest["longest_prompt"], manifest["sampling"]["max_new_tokens"]
