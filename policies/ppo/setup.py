"""Sets up `rlhf ppo`: models, optimizer, rewards, reference rows and pretraining texts."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.ppo.batches import StepTexts, chunks_per_step, read_chunks
from policies.ppo.kl import reference_policy
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.models.critic import new_critic
from policies.ppo.models.shared_base import (
    add_policy_adapters,
    critic_on,
    frozen_bytes,
    load_base,
    policy_on,
)
from policies.ppo.rollout import RolloutContext
from policies.ppo.settings import PPOSettings
from policies.reference.rewards import rewards_by_prompt
from policies.reference.store import ReferenceRow, ReferenceStore
from policies.rewards import load_reward
from policies.sampling.engines import new_sampler
from rlhf.errors import ConfigError
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.sharding import Sharding, prepare, shard_first
from rlhf.planning.flops import count_flops
from rlhf.planning.utilization import measure_rate
from rlhf.records.documents import Kinds
from rlhf.run.rundir import RunDir

STATE: Kinds = {  # as progress.json of a checkpoint has it
    "critic_fit": dict | None,
    "guard_counts": dict,
    "audited_kl": int | float | None,
    "kl_coefficient": int | float,
}
ADAM_EPSILON = 1e-5  # PyTorch's default of 1e-8 makes early approx-KL several times larger


@dataclass
class LoopState:
    """State of the loop besides weights; checkpoints keep it.

    Attributes:
        kl_coefficient: weight of the KL term; an adaptive one changes.
        critic_fit: what fitting the critic's head has found.
        guard_counts: for how many steps each warning has persisted.
        audited_kl: the reverse KL of the last audit.
    """

    kl_coefficient: float
    critic_fit: dict[str, Any] | None = None
    guard_counts: dict[str, int] = field(default_factory=dict)
    audited_kl: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any], settings: PPOSettings) -> "LoopState":
        """The state in a checkpoint's progress.json; what that lacks is as at the start."""
        usual = asdict(cls(settings.kl.coefficient))
        return cls(**{name: saved.get(name, value) for name, value in usual.items()})


@dataclass(frozen=True)
class Training:
    """Everything that the training loop uses.

    Attributes:
        prompts: the reference rows of every training prompt.
        texts: pretraining texts; None without --ptx.data.
        dp_rank: which part of every batch this process computes. The processes of a tensor-parallel
            group compute the same part.
        dp_size: how many parts there are.
        policy_copy: all weights of the policy where they are sharded, to sample from it; else the
            policy itself.
        model_copy: the same of policy and critic, to measure with; under FSDP the sharded modules
            themselves.
        matmul_rate: operations a second of a large matrix product on this device.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokenizer: PreTrainedTokenizerBase
    rollout: RolloutContext
    store: ReferenceStore
    prompts: Sequence[tuple[ReferenceRow, ...]]
    texts: StepTexts | None
    settings: PPOSettings
    run: RunDir
    policy_copy: GatheredModel
    model_copy: GatheredModel
    frozen_bytes: dict[str, int] | None
    dp_rank: int
    dp_size: int
    matmul_rate: float


def require_even_split(settings: PPOSettings, processes: int) -> None:
    """Refuse a number of episodes that processes and minibatches cannot share.

    Raises:
        ConfigError: names the multiple that it must be.
    """
    share = processes * math.lcm(settings.optim.minibatches, settings.batch.samples_per_prompt)
    if settings.batch.episodes_per_step % share:
        raise ConfigError(
            f"--batch.episodes-per-step {settings.batch.episodes_per_step} does not divide into "
            f"{processes} processes × {settings.optim.minibatches} minibatches, with "
            f"{settings.batch.samples_per_prompt} samples of each prompt in one process",
            f"Make it a multiple of {share}.",
        )


def set_up(
    settings: PPOSettings,
    store: ReferenceStore,
    accelerator: Accelerator,
    sharding: Sharding,
    run: RunDir,
) -> Training:
    """Load and prepare everything.

    Raises:
        InputError: a model, a reward or a text cannot be loaded, or a reward is not a number.
    """
    rate = measure_rate(accelerator, run.speed_file)
    store.check_on_main()
    tokenizer = store.load_tokenizer(settings.model)
    base = load_base(settings, accelerator)
    plain, policy_copy = build_models(settings, tokenizer, base, accelerator, sharding)
    # transformers checkpoints in this mode only
    plain.train(settings.batch.gradient_checkpointing)
    is_copy = sharding.shards_weights and not rollout_sharding(sharding).shards_weights
    bf16_weights = settings.precision == "bf16-weights"
    model_copy = GatheredModel(
        plain,
        accelerator.device,
        is_copy=is_copy,
        bf16_weights=bf16_weights,
        fp32_modules=plain.fp32_modules,
    )
    model, optimizer = prepare(
        accelerator,
        plain,
        _new_optimizer(plain),
        sharding,
        bf16_weights=bf16_weights,
        fp32_modules=plain.fp32_modules,
    )
    register_fsdp_forward_method(model, "call_gathered")
    dp_rank, dp_size = (
        number // settings.parallel.tensor_parallel
        for number in (accelerator.process_index, accelerator.num_processes)
    )
    return Training(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        tokenizer=tokenizer,
        rollout=_rollout_context(settings, store, accelerator, sharding, base, tokenizer),
        store=store,
        prompts=store.by_prompt("train"),
        texts=_read_texts(settings, tokenizer, accelerator.device, dp_rank, dp_size),
        settings=settings,
        run=run,
        policy_copy=policy_copy,
        model_copy=model_copy,
        frozen_bytes=_describe_sharing(accelerator, settings, base),
        dp_rank=dp_rank,
        dp_size=dp_size,
        matmul_rate=rate,
    )


def rollout_sharding(sharding: Sharding) -> Sharding:
    """How policy, critic and original model are held while a rollout is measured.

    FSDP runs them a layer at a time. With ZeRO 3 policy and critic are gathered, and the original
    model is whole where it is loaded.
    """
    if sharding.strategy == "fsdp":
        return sharding
    return Sharding(tensor_parallel=sharding.tensor_parallel)


def _rollout_context(
    settings: PPOSettings,
    store: ReferenceStore,
    accelerator: Accelerator,
    sharding: Sharding,
    base: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
) -> RolloutContext:
    reward = load_reward(
        settings.reward,
        accelerator,
        weights=settings.rewards.weights,
        combination=settings.rewards.combination,
        sharding=sharding,
        base=base,
        given=store.template_kwargs,
    )
    held = rollout_sharding(sharding)
    return RolloutContext(
        accelerator=accelerator,
        tokenizer=tokenizer,
        reward=reward,
        reference_policy=reference_policy(settings.kl.source, store, accelerator, held),
        reference_rewards=rewards_by_prompt(store, reward, tokenizer, accelerator, sharding),
        sampling=store.sampling,
        shaping=settings.shaping,
        sampler=new_sampler(
            settings.sampling.engine,
            settings.model,
            accelerator,
            store.manifest["longest_prompt"] + store.sampling.max_new_tokens,
            settings.sampling.batch_size,
            # rounded to 4 bits, the frozen weights are not those of the folder
            lora_rank=None if settings.lora.four_bit_base else settings.lora.rank,
            tensor_parallel=settings.sampling.engine_tensor_parallel,
        ),
        sampler_correction=settings.sampler_correction,
        sharding=held,
    )


def _new_optimizer(model: PolicyAndCritic) -> torch.optim.Optimizer:
    """An optimizer with a group for the policy and one for the critic."""
    groups = [
        {"params": [parameter for parameter in part.parameters() if parameter.requires_grad]}
        for part in model.parts.values()
    ]
    return torch.optim.AdamW(
        groups, betas=(0.9, 0.95), eps=ADAM_EPSILON, weight_decay=0.0, fused=True
    )


def build_models(
    settings: PPOSettings,
    tokenizer: PreTrainedTokenizerBase,
    base: PreTrainedModel | None,
    accelerator: Accelerator,
    sharding: Sharding,
) -> tuple[PolicyAndCritic, GatheredModel]:
    """Policy and critic, and the copy of the policy to sample from.

    Under FSDP the policy is sharded before the critic is read: the main process, which reads both,
    never holds both whole.
    """
    policy = _load_policy(settings, base, sharding)
    _equip(policy, settings, accelerator)
    bf16_weights = settings.precision == "bf16-weights"
    # from FSDP's shards vLLM takes one weight at a time
    is_given = sharding.strategy == "fsdp" and settings.sampling.engine == "vllm"
    policy_copy = GatheredModel(
        policy,
        accelerator.device,
        is_copy=sharding.shards_weights and not is_given,
        bf16_weights=bf16_weights,
    )
    shard_first(accelerator, policy, sharding, bf16_weights=bf16_weights)
    if base is not None and settings.has_critic and settings.critic.model == "own":
        model = PolicyAndCritic(policy, *critic_on(base, settings, int(tokenizer.pad_token_id)))
    else:
        model = PolicyAndCritic(policy, *new_critic(settings, tokenizer, sharding))
    if isinstance(model.critic, PreTrainedModel):
        _equip(model.critic, settings, accelerator)
    return model, policy_copy


def _load_policy(
    settings: PPOSettings, base: PreTrainedModel | None, sharding: Sharding
) -> PreTrainedModel:
    if base is not None:
        return policy_on(base, settings)
    policy = load_causal_lm(settings.model, held=sharding.held(trained=True), trained=True)
    if settings.lora.rank:
        add_policy_adapters(policy, settings)
    return policy


def _equip(model: PreTrainedModel, settings: PPOSettings, accelerator: Accelerator) -> None:
    """Let a model count its work, read packed rows, and checkpoint its activations if asked to."""
    count_flops(model)
    if obstacle := pack_prefixes(model):
        message = f"Sequences are padded, which takes longer: {obstacle}."
        accelerator.print(message, file=sys.stderr)
    if settings.batch.gradient_checkpointing:
        checkpoint_activations(model)
    model.train(settings.batch.gradient_checkpointing)


def _describe_sharing(
    accelerator: Accelerator, settings: PPOSettings, base: PreTrainedModel | None
) -> dict[str, int] | None:
    if base is None:
        return None
    sizes = frozen_bytes(base, settings)
    shared, separate = (f"{sizes[name] / 2**30:.3g} GiB" for name in ("shared", "separate"))
    message = f"Frozen weights: {shared}, shared by all roles; a copy for each would be {separate}."
    accelerator.print(message, file=sys.stderr)
    return sizes


def _read_texts(
    settings: PPOSettings,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dp_rank: int,
    dp_size: int,
) -> StepTexts | None:
    """The pretraining texts: as many chunks as all steps take, where the file has them."""
    if settings.ptx.data is None:
        return None
    per_step = dp_size * chunks_per_step(settings, dp_size)
    limit = settings.steps * per_step
    return StepTexts(
        chunks=read_chunks(settings.ptx.data, tokenizer, settings.ptx.length, limit),
        per_step=per_step,
        seed=settings.seed,
        dp_rank=dp_rank,
        dp_size=dp_size,
        pad_id=int(tokenizer.pad_token_id),
        device=device,
    )
