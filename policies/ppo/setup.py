"""What `rlhf ppo` works with: models, optimizer, rewards, stored rows and texts, ready to train."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.ppo.batches import items_of_step, pieces_per_step, read_pieces, stack_pieces
from policies.ppo.kl import reference_policy
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.models.critic import new_critic
from policies.ppo.models.shared_base import critic_on, frozen_bytes, load_base, policy_on
from policies.ppo.rollout import Environment
from policies.ppo.settings import PPOSettings
from policies.reference.rewards import rewards_by_prompt
from policies.reference.store import ReferenceRow, ReferenceStore
from policies.rewards.sources import load_reward
from policies.sampling.continuous import sample_continuously
from policies.sampling.generate import Sampler
from policies.sampling.vllm_engine import VLLM
from rlhf.errors import ConfigError
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.sharding import Sharding, prepare
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
    """What the loop works with.

    `prompts` are the stored rows of every training prompt, `texts` pieces of pretraining text.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    store: ReferenceStore
    prompts: Sequence[tuple[ReferenceRow, ...]]
    texts: Sequence[list[int]]
    settings: PPOSettings
    run: RunDir
    gathered_model: GatheredModel
    frozen_bytes: dict[str, int] | None

    @property
    def dp_size(self) -> int:
        """Parts of a batch: a process has one, or processes that hold a model together."""
        processes: int = self.accelerator.num_processes
        return processes // self.settings.parallel.tensor_parallel

    @property
    def dp_rank(self) -> int:
        """Which of them is this process's."""
        number: int = self.accelerator.process_index
        return number // self.settings.parallel.tensor_parallel

    def texts_of(self, step: int) -> Sequences | None:
        """This process's chunks of pretraining text in a step; None where there are no texts."""
        if not self.texts:
            return None
        pieces = items_of_step(
            self.texts,
            step,
            self.dp_size * pieces_per_step(self.settings, self.dp_size),
            self.settings.seed,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )
        return stack_pieces(pieces, int(self.tokenizer.pad_token_id), self.accelerator.device)

    @contextmanager
    def gathered(self) -> Iterator[PolicyAndCritic]:
        """Policy and critic with all their weights in every process, which all enter together."""
        with self.gathered_model.gathered(self.model) as plain:
            yield plain


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
    environment = Environment(
        accelerator=accelerator,
        tokenizer=tokenizer,
        reward=reward,
        reference_policy=reference_policy(
            settings.kl.source, store, accelerator, tensor_parallel=sharding.is_tensor_parallel
        ),
        reference_rewards=rewards_by_prompt(store, reward, tokenizer, accelerator.device),
        sampling=store.sampling,
        sampler=_new_sampler(settings, store, accelerator),
    )
    return Training(
        accelerator=accelerator,
        model=model,
        optimizer=stepper,
        tokenizer=tokenizer,
        environment=environment,
        store=store,
        prompts=store.by_prompt("train"),
        texts=_read_texts(
            settings, tokenizer, accelerator.num_processes // settings.parallel.tensor_parallel
        ),
        settings=settings,
        run=run,
        gathered_model=gathered_model,
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
        tensor_parallel = settings.parallel.tensor_parallel > 1
        policy = load_causal_lm(settings.model, tensor_parallel=tensor_parallel, trained=True)
        if settings.lora.rank:
            add_adapters(policy, settings.lora.rank, 2 * settings.lora.rank, settings.seed)
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
