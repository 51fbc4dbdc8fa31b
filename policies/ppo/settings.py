"""The settings of `rlhf ppo`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from policies.ppo.setting_groups import (
    BatchSettings,
    CriticSettings,
    GuardSettings,
    KLSettings,
    LoraSettings,
    LossSettings,
    OptimSettings,
    PtxSettings,
    RewardsSettings,
    SamplingSettings,
)
from rlhf.config import MAX_SEED, TrainingPrecision, require_range
from rlhf.errors import ConfigError
from rlhf.parallel.settings import CheckpointSettings, ClusterSettings

MAX_RELATIVE_ERROR = 0.2  # of the KL, as the controller of its coefficient takes it


@dataclass(frozen=True, kw_only=True)
class PPOSettings(ClusterSettings):
    """Settings of `rlhf ppo`."""

    OLD_NAMES: ClassVar[dict[str, str]] = {
        **ClusterSettings.OLD_NAMES,
        "critic": "critic.model",  # first: in old files the others need the group in its place
        "critic_trains": "critic.trains",
        "critic_warmup": "critic.warmup",
        "critic_learning_rate": "critic.learning_rate",
        "value_coefficient": "critic.coefficient",
        "value_clip_range": "critic.clip_range",
        "learning_rate": "optim.learning_rate",
        "epochs": "optim.epochs",
        "minibatches": "optim.minibatches",
        "max_grad_norm": "optim.max_grad_norm",
        "target_kl": "optim.target_kl",
        "max_approx_kl": "optim.target_kl",
        "episodes_per_step": "batch.episodes_per_step",
        "samples_per_prompt": "batch.samples_per_prompt",
        "micro_batch_size": "batch.micro_batch_size",
        "micro_tokens": "batch.micro_tokens",
        "gradient_checkpointing": "batch.gradient_checkpointing",
        "clip_range": "loss.clip_range",
        "clip_range_high": "loss.clip_range_high",
        "dual_clip": "loss.dual_clip",
        "gamma": "loss.gamma",
        "gae_lambda": "loss.gae_lambda",
        "group_std": "loss.grpo_std",
        "reward_weights": "rewards.weights",
        "reward_combination": "rewards.combination",
        "reward_shaping": "rewards.shaping",
        "missing_eos_penalty": "rewards.missing_eos_penalty",
        "missing_eos_reward": "rewards.missing_eos_reward",
        "mask_truncated": "rewards.mask_truncated",
        "length_penalty": "rewards.length_penalty",
        "reward_limit": "rewards.limit",
        "lora_rank": "lora.rank",
        "share_base": "lora.share_base",
        "four_bit_base": "lora.four_bit_base",
        "ptx_data": "ptx.data",
        "ptx_coefficient": "ptx.coefficient",
        "ptx_length": "ptx.length",
        "ptx_per_episode": "ptx.per_episode",
        "engine": "sampling.engine",
        "engine_tensor_parallel": "sampling.engine_tensor_parallel",
        "sample_batch_size": "sampling.batch_size",
        "sampler_correction": "sampling.correction",
        "sampler_cap": "sampling.correction_cap",
        "save_every": "checkpoint.every",
        "keep_checkpoints": "checkpoint.keep",
        "kl.rows_per_episode": "kl.rows_per_prompt",
    }
    OLD_VALUES: ClassVar[dict[str, dict[str, str]]] = {
        **ClusterSettings.OLD_VALUES,
        "advantages": {"group": "grpo"},
    }
    ZERO_IS_NONE: ClassVar[frozenset[str]] = ClusterSettings.ZERO_IS_NONE | {
        "batch.micro_tokens",
        "guards.patience",
        "kl.audit_every",
        "lora.rank",
    }
    # in the config.yaml of runs of rloo and group, which never had a critic
    OLD_FILE_VALUES: ClassVar[dict[str, dict[str, str]]] = {"critic.model": {"none": "own"}}

    model: str
    """The model to train: the one that the reference outputs came from."""
    reward: tuple[str, ...]
    """What to train against: the --out of `rlhf train-reward`, a Hugging Face reward model with
    one label, a function `signal:package.module:function`, or an http(s):// address. Give several
    to combine them."""
    reference: Path
    """The --out of `rlhf reference`: prompts and what the model answered before training."""
    out: Path
    """Folder for the trained policy, checkpoints, metrics and report."""
    steps: int = 100
    """Number of PPO steps: sample, score, update."""
    advantages: Literal["gae", "rloo", "grpo"] = "gae"
    """How advantages are computed. `gae`: generalized advantage estimation with a critic. Without a
    critic: `rloo`: subtract the mean reward of the prompt's other samples; `grpo`: subtract the
    mean reward of the prompt's samples and divide by their standard deviation."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """Optimizer steps of the policy."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    """How much is sampled per step and computed at once."""
    kl: KLSettings = field(default_factory=KLSettings)
    """The KL term."""
    rewards: RewardsSettings = field(default_factory=RewardsSettings)
    """From scores to rewards."""
    loss: LossSettings = field(default_factory=LossSettings)
    """Policy loss and advantages."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """The value model of gae."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """How responses are sampled."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """LoRA adapters instead of all weights."""
    ptx: PtxSettings = field(default_factory=PtxSettings)
    """Pretraining texts in the loss."""
    guards: GuardSettings = field(default_factory=GuardSettings)
    """Warnings, and when they stop the run."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """Saved states."""
    seed: int = 0
    """Random seed."""
    precision: TrainingPrecision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32. bf16-weights:
    the trained model also holds its weights and gradients in bf16, with float32 masters that the
    optimizer updates; for GPUs, and only if all weights are trained."""
    resume: bool = False
    """Continue an unfinished run in --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("steps", self.steps, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        if not self.reward or len(self.rewards.weights) not in (0, len(self.reward)):
            raise ConfigError(
                f"{len(self.rewards.weights)} --rewards.weights for {len(self.reward)} --reward",
                "Give one weight for each reward, in the same order, or none.",
            )
        episodes, minibatches = self.batch.episodes_per_step, self.optim.minibatches
        if episodes % minibatches:
            raise ConfigError(
                f"--batch.episodes-per-step {episodes} does not divide into "
                f"--optim.minibatches {minibatches}",
                "Make the first a multiple of the second.",
            )
        samples = self.batch.samples_per_prompt
        if self.advantages != "gae" and samples < 2:
            raise ConfigError(
                f"--advantages {self.advantages} compares the responses to one prompt, and "
                f"--batch.samples-per-prompt is {samples}",
                "Set --batch.samples-per-prompt to 2 or more.",
            )
        self._require_kl()
        self._require_adapters()
        self._require_engine_groups(self.sampling.engine_tensor_parallel)
        self._require_tensor_parallel(**{"lora.rank": None, "sampling.engine": "generate"})
        self._require_bf16_weights_fit(self.precision, **{"lora.rank": None})

    def _require_kl(self) -> None:
        shortest = MAX_RELATIVE_ERROR * self.batch.episodes_per_step
        if self.kl.target is not None and self.kl.horizon <= shortest:
            raise ConfigError(
                f"--kl.horizon is {self.kl.horizon}: the {self.batch.episodes_per_step} responses "
                "of one step could turn the coefficient negative",
                f"Give more than {shortest:g}; 10000 is usual.",
            )
        if self.guards.max_kl and self.kl.source == "none" and not self.kl.audit_every:
            raise ConfigError(
                f"--guards.max-kl {self.guards.max_kl:g} with --kl.source none: no step measures a "
                "KL",
                "Add --kl.audit-every 10, use another --kl.source, or leave --guards.max-kl out.",
            )

    def _require_adapters(self) -> None:
        if self.kl.source == "adapter" and not self.lora.rank:
            raise ConfigError(
                "--kl.source adapter switches the policy's adapter off, and there is none",
                "Add --lora.rank 16, or use --kl.source resident.",
            )
        if not self.lora.four_bit_base:
            return
        if self.kl.source == "reference":
            raise ConfigError(
                "--lora.four-bit-base with --kl.source reference: the stored log-probs are those "
                "of the original model, not of its 4-bit version",
                "Use --kl.source adapter: the reference is then the same 4 bits without adapters.",
            )
        if self.kl.source == "none" and self.kl.audit_every:
            raise ConfigError(
                "--lora.four-bit-base with --kl.audit-every: the audit would compare 4 bits with "
                "the original model",
                "Use --kl.source adapter, which measures the reverse KL in every step; with "
                "--kl.coefficient 0 it only measures.",
            )

    @property
    def holds_reference(self) -> bool:
        """Whether the policy is the original model when its adapters are switched off."""
        # the reference is the model in full precision, not in 4 bits
        return self.lora.rank is not None and not self.lora.four_bit_base

    @property
    def sampler_correction(self) -> Literal["none", "token", "sequence"]:
        """--sampling.correction with `auto` resolved."""
        if self.sampling.correction != "auto":
            return self.sampling.correction
        return "none" if self.sampling.engine == "generate" else "token"

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.advantages == "gae"

    @property
    def shaping(self) -> dict[str, Any]:
        """The settings that `policies.formulas.shape_rewards` takes."""
        rewards = self.rewards
        return {
            "shaping": rewards.shaping,
            "missing_eos_penalty": rewards.missing_eos_penalty,
            "missing_eos_reward": rewards.missing_eos_reward,
            "length_penalty": rewards.length_penalty,
            "limit": rewards.limit,
        }
