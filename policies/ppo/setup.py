"""What `rlhf ppo` works with: models, optimizer, rewards, stored rows and texts, ready to train."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.ppo.kl import ReferencePolicy, reference_policy
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.models.critic import new_critic
from policies.ppo.models.shared_base import critic_on, frozen_bytes, load_base, policy_on
from policies.ppo.pretraining import pieces_per_step, read_pieces
from policies.ppo.settings import PPOSettings
from policies.reference.rewards import rewards_by_prompt
from policies.reference.store import ReferenceRow, ReferenceStore
from policies.rewards.sources import Reward, load_reward
from policies.sampling.continuous import sample_continuously
from policies.sampling.generate import Sampler
from policies.sampling.vllm_engine import VLLM
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.run.rundir import RunDir

ADAM_EPSILON = 1e-5  # PyTorch's default of 1e-8 makes early approx-KL several times larger


@dataclass(frozen=True)
class Training:
    """What the loop works with.

    `prompts` are the stored rows of every training prompt, `texts` pieces of pretraining text.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokenizer: PreTrainedTokenizerBase
    reward: Reward
    reference_policy: ReferencePolicy | None
    store: ReferenceStore
    prompts: Sequence[tuple[ReferenceRow, ...]]
    reference_rewards: dict[str, list[float]]
    texts: Sequence[list[int]]
    settings: PPOSettings
    run: RunDir
    gathered_model: GatheredModel
    sampler: Sampler | None
    frozen_bytes: dict[str, int] | None

    @property
    def dp_size(self) -> int:
        """Parts of a batch: a process has one, or processes that hold a model together."""
        processes: int = self.accelerator.num_processes
        return processes // self.settings.tensor_parallel

    @property
    def dp_rank(self) -> int:
        """Which of them is this process's."""
        number: int = self.accelerator.process_index
        return number // self.settings.tensor_parallel

    @contextmanager
    def gathered(self) -> Iterator[PolicyAndCritic]:
        """Policy and critic with all their weights in every process, which all enter together."""
        with self.gathered_model.gathered(self.model) as plain:
            yield plain


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
    tokenizer = store.load_tokenizer(settings.model)
    base = load_base(settings, accelerator)
    plain = _build_models(settings, tokenizer, base)
    for part in (one for one in plain.parts.values() if isinstance(one, PreTrainedModel)):
        if obstacle := pack_prefixes(part):
            words = f"Sequences are padded, which takes longer: {obstacle}."
            accelerator.print(words, file=sys.stderr)
        if settings.batch.gradient_checkpointing:
            part.activation_checkpointing_enable({"use_reentrant": False})
    plain.train(settings.batch.gradient_checkpointing)  # transformers checkpoints in this mode only
    gathered_model = GatheredModel(plain, accelerator.device, sharding)
    model, stepper = prepare(accelerator, plain, _new_optimizer(plain), sharding)
    reward = load_reward(
        settings.reward,
        accelerator,
        weights=settings.rewards.weights,
        combination=settings.rewards.combination,
        sharding=sharding,
        base=base,
        given=store.template_kwargs,
    )
    return Training(
        accelerator=accelerator,
        model=model,
        optimizer=stepper,
        tokenizer=tokenizer,
        reward=reward,
        reference_policy=reference_policy(
            settings.kl.source, store, accelerator, tensor_parallel=sharding.is_tensor_parallel
        ),
        store=store,
        prompts=store.by_prompt("train"),
        reference_rewards=rewards_by_prompt(store, reward, tokenizer, accelerator.device),
        texts=_read_texts(
            settings, tokenizer, accelerator.num_processes // settings.tensor_parallel
        ),
        settings=settings,
        run=run,
        gathered_model=gathered_model,
        sampler=_new_sampler(settings, store, accelerator),
        frozen_bytes=_describe_sharing(accelerator, settings, base),
    )


def _new_sampler(
    settings: PPOSettings, store: ReferenceStore, accelerator: Accelerator
) -> Sampler | None:
    """Who samples rollouts; None is transformers' plain `generate`."""
    if settings.sampling.engine == "continuous":
        return sample_continuously
    if settings.sampling.engine == "vllm":
        longest = store.manifest["longest_prompt"] + store.sampling.max_new_tokens
        return VLLM(settings.model, accelerator, longest, settings.sampling.batch_size)
    return None


def _new_optimizer(model: PolicyAndCritic) -> torch.optim.Optimizer:
    """An optimizer with a group for the policy and one for the critic."""
    groups = [
        {"params": [one for one in part.parameters() if one.requires_grad]}
        for part in model.parts.values()
    ]
    return torch.optim.AdamW(
        groups, betas=(0.9, 0.95), eps=ADAM_EPSILON, weight_decay=0.0, fused=True
    )


def _build_models(
    settings: PPOSettings, tokenizer: PreTrainedTokenizerBase, base: PreTrainedModel | None
) -> PolicyAndCritic:
    if base is None:
        tensor_parallel = settings.tensor_parallel > 1
        policy = load_causal_lm(settings.model, tensor_parallel=tensor_parallel, trained=True)
        alpha = 2 * settings.lora.rank
        if settings.lora.rank:
            add_adapters(policy, settings.lora.rank, alpha, settings.seed)
    else:
        policy = policy_on(base, settings)
        if settings.has_critic and settings.critic.model == "own":
            pad_token_id = int(tokenizer.pad_token_id)
            return PolicyAndCritic(policy, *critic_on(base, settings, pad_token_id))
    return PolicyAndCritic(policy, *new_critic(settings, tokenizer))


def _describe_sharing(
    accelerator: Accelerator, settings: PPOSettings, base: PreTrainedModel | None
) -> dict[str, int] | None:
    if base is None:
        return None
    found = frozen_bytes(base, settings)
    shared, separate = (f"{found[name] / 2**30:.3g} GiB" for name in ("shared", "separate"))
    words = f"Frozen weights: {shared}, shared by all roles; a copy for each would be {separate}."
    accelerator.print(words, file=sys.stderr)
    return found


def _read_texts(
    settings: PPOSettings, tokenizer: PreTrainedTokenizerBase, processes: int
) -> list[list[int]]:
    """Pieces of pretraining text: as many as all steps take, where the file has them."""
    if settings.ptx.data is None:
        return []
    limit = settings.steps * processes * pieces_per_step(settings, processes)
    return read_pieces(settings.ptx.data, tokenizer, settings.ptx.length, limit)
