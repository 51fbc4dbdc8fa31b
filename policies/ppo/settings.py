"""The settings of `rlhf ppo`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlhf.config import MAX_SEED, Precision, require_range
from rlhf.errors import ConfigError
from rlhf.parallel.settings import ClusterSettings

Engine = Literal["generate", "continuous", "vllm"]
MAX_RELATIVE_ERROR = 0.2  # of the KL, as the controller of its coefficient takes it


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """The brake that keeps the policy near the original model."""

    source: Literal["reference", "adapter", "resident", "none"] = "reference"
    """`reference`: forward KL on the stored outputs; `adapter`: reverse KL, the reference being
    the policy without its LoRA adapter; `resident`: reverse KL with a frozen copy; `none`."""
    estimator: Literal["k3", "k1", "top_k", "token_reverse"] = "k3"
    """Of `reference`: k3 or k1 of the forward KL, its exact value on the likeliest tokens (`rlhf
    reference --store-top-k`), or the reverse KL of each next token."""
    coefficient: float = 0.1
    """Weight of the KL: of its mean over stored tokens, or of every sampled token's in the
    reward."""
    target: float | None = None
    """Nats per token that a controller steers the coefficient to; fixed when not given."""
    horizon: int = 10_000
    """Responses in which the controller may change the coefficient by a fifth."""
    audit_every: int = 0
    """Steps between audits of the true reverse KL, for which the original model is loaded unless it
    lies beneath adapters; 0 is only after training. `adapter` and `resident` measure every step."""
    rows_per_episode: float = 0.5
    """Stored rows in the KL term for each prompt of a step, at most 1; several
    --samples-per-prompt share them."""

    def __post_init__(self) -> None:
        require_range("kl.coefficient", self.coefficient, 0.0)
        require_range("kl.audit_every", self.audit_every, 0)
        require_range("kl.horizon", self.horizon, 1)
        if self.target is not None:
            require_range("kl.target", self.target, 0.0, above_low=True)
            if self.source == "none" or self.coefficient == 0:
                raise ConfigError(
                    f"--kl.target {self.target:g} steers the coefficient of the KL term, and with "
                    f"--kl.source {self.source} --kl.coefficient {self.coefficient:g} there is no "
                    "such term",
                    "Leave --kl.target out, or use another --kl.source and --kl.coefficient.",
                )
        require_range("kl.rows_per_episode", self.rows_per_episode, 0.0, 1.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """When a run is warned of, and stopped; measured against the stored reference outputs."""

    patience: int = 10
    """Steps in a row that a sign may stand before the run ends with 3; 0 only warns."""
    max_kl: float | None = None
    """Ceiling of the KL that steps measure and of the last audit's, in nats per token; none when
    not given."""
    min_entropy: float = 0.1
    """Least entropy, as a share of the reference outputs'."""
    length_band: float = 3.0
    """With a reward above the reference's: how many times longer or shorter answers may get."""
    eos_drop: float = 0.5
    """With a reward above the reference's: how far the share of answers that end may fall."""
    min_distinct: float = 0.5
    """With a reward above the reference's: least share of different token pairs in an answer, as
    a share of the reference outputs'."""

    def __post_init__(self) -> None:
        require_range("guards.patience", self.patience, 0)
        if self.max_kl is not None:
            require_range("guards.max_kl", self.max_kl, 0.0, above_low=True)
        require_range("guards.min_entropy", self.min_entropy, 0.0, 1.0)
        require_range("guards.length_band", self.length_band, 1.0)
        require_range("guards.eos_drop", self.eos_drop, 0.0, 1.0)
        require_range("guards.min_distinct", self.min_distinct, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class PPOSettings(ClusterSettings):
    """Settings of `rlhf ppo`."""

    model: str
    """The model to train: the one that the reference outputs came from."""
    reward: tuple[str, ...]
    """The --out of `rlhf train-reward` or a Hugging Face folder with one label; a function
    `signal:package.module:function`; or an http(s):// address. Several are combined."""
    reference: Path
    """The --out of `rlhf reference`."""
    out: Path
    """Folder of this stage."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward, 1 when not given."""
    reward_combination: Literal["sum", "mean", "worst"] = "sum"
    """Several rewards become their weighted sum, its mean, or the lowest of them."""
    steps: int = 100
    """Rounds of sampling and updating."""
    episodes_per_step: int = 64
    """Responses sampled per step, over all processes."""
    epochs: int = 1
    """Passes over the episodes of a step."""
    minibatches: int = 1
    """Optimizer steps per pass, among which response tokens are shared evenly."""
    micro_batch_size: int = 16
    """Sequences in one forward and backward; changes speed and memory only."""
    micro_tokens: int = 0
    """Tokens in one forward and backward in place of --micro-batch-size: sequences of like length,
    shifted to end together, leave hardly any padding to compute; 0: count sequences."""
    learning_rate: float = 3e-6
    """Peak learning rate of the policy, annealed to 0."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of the critic, annealed to 0."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank instead of all weights of the policy; 0 is off."""
    share_base: bool = False
    """Policy, critic and reward models are LoRA adapters on one frozen model, in bf16 with bf16
    autocast; needs --lora-rank and reward models of --adapter lora."""
    four_bit_base: bool = False
    """Hold the model of --share-base in 4 bits, on CUDA."""
    max_grad_norm: float = 1.0
    """Gradient clipping, policy and critic each."""
    clip_range: float = 0.2
    """PPO's clip of the probability ratio, to 1 ± this."""
    clip_range_high: float | None = None
    """Upper clip of the ratio is 1 + this; default: --clip-range."""
    dual_clip: float | None = None
    """Bound the loss of a token with a negative advantage at this multiple of the advantage, 3 in
    the paper; no bound when not given."""
    value_clip_range: float = 0.2
    """Clip of the value's change in one update."""
    value_coefficient: float = 0.1
    """Weight of the value loss."""
    critic: Literal["own", "head", "none"] = "own"
    """Of gae: `own`, a model that starts as the first reward model; `head`, one linear layer on the
    policy's last hidden states, hardly any memory. rloo and group have none."""
    critic_warmup: bool = True
    """Fit the critic's head to the rewards of the stored outputs before the first step."""
    critic_trains: Literal["all", "head"] = "all"
    """`head`: the critic's trunk stays frozen; half the memory, almost half the update's time. With
    --critic head the trunk is the policy's, which the value loss then leaves alone."""
    advantages: Literal["gae", "rloo", "group"] = "gae"
    """`gae`: a critic. Without one: `rloo`, minus the mean of the prompt's other responses;
    `group`, minus the mean of all of them, over their standard deviation."""
    samples_per_prompt: int = 1
    """Responses to one prompt in one step; at least 2 for rloo and group."""
    group_std: bool = True
    """Divide the advantages of `group` by the standard deviation."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """GAE's λ: 1 is unbiased and noisy, 0 trusts the critic."""
    max_approx_kl: float = 0.2
    """Stop a step's updates when ½ mean (Δ log-prob)² exceeds this."""
    reward_shaping: Literal["centered", "par", "none"] = "centered"
    """`centered`: minus the mean reward of the prompt's stored outputs. `par`: the mean
    probability of being preferred to them, σ of the difference."""
    missing_eos_penalty: float = 1.0
    """Taken from the reward of a response that did not end by itself."""
    missing_eos_reward: float | None = None
    """What such a response earns, whatever its score; --missing-eos-penalty is then not taken."""
    mask_truncated: bool = False
    """Leave responses cut at the length limit out of the policy and value losses. Their rewards
    still count in the baselines of rloo and group."""
    length_penalty: float = 0.0
    """Taken from the reward for every token of the response."""
    reward_limit: float | None = None
    """Shaped rewards are clipped to ± this."""
    ptx_data: Path | None = None
    """Texts whose likelihood is kept up (PPO-ptx): JSON Lines with `text`, or a .txt file with one
    on each line."""
    ptx_coefficient: float = 1.0
    """Weight of their mean negative log-likelihood per token."""
    ptx_length: int = 256
    """Most tokens in a piece of text; longer texts are cut."""
    ptx_per_episode: float = 1.0
    """Pieces of text in a step for each sampled response."""
    kl: KLSettings = field(default_factory=KLSettings)
    """The KL term."""
    guards: GuardSettings = field(default_factory=GuardSettings)
    """Signs that stop the run."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""
    sample_batch_size: int = 64
    """Sequences sampled at once."""
    engine: Engine = "generate"
    """`generate`: transformers' plain sampling. `continuous`: its continuous batching, in which
    responses that end make room for others, with CUDA graphs on a GPU. `vllm`: vLLM, where it is
    installed, with a copy of the policy's weights."""
    sampler_correction: Literal["auto", "none", "token", "sequence"] = "auto"
    """`token`: weight each token's policy loss by π/μ, its probability under the trained policy
    over the sampler's, at most --sampler-cap. `sequence`: also leave out responses whose geometric
    mean of π/μ is beyond the cap or its inverse. `auto`: `none` with --engine generate, else
    `token`."""
    sampler_cap: float = 2.0
    """Largest importance weight of --sampler-correction."""
    save_every: int = 25
    """Steps between checkpoints."""
    keep_checkpoints: int = 1
    """Checkpoints kept on disk."""
    seed: int = 0
    """Random seed."""
    precision: Precision = "auto"
    """bf16 autocast where the hardware has it (auto), always (bf16) or never (fp32)."""
    resume: bool = False
    """Go on with an unfinished --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "episodes_per_step", "epochs", "minibatches", "micro_batch_size"):
            require_range(name, getattr(self, name), 1)
        for name in ("sample_batch_size", "save_every", "keep_checkpoints"):
            require_range(name, getattr(self, name), 1)
        for name in ("learning_rate", "critic_learning_rate", "max_grad_norm"):
            require_range(name, getattr(self, name), 0.0, above_low=True)
        require_range("value_coefficient", self.value_coefficient, 0.0)
        require_range("micro_tokens", self.micro_tokens, 0)
        require_range("ptx_coefficient", self.ptx_coefficient, 0.0)
        require_range("ptx_length", self.ptx_length, 2)
        require_range("ptx_per_episode", self.ptx_per_episode, 0.0, above_low=True)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("gamma", self.gamma, 0.0, 1.0)
        require_range("gae_lambda", self.gae_lambda, 0.0, 1.0)
        self._require_clips()
        self._require_group()
        self._require_kl()
        if self.engine == "vllm" and find_spec("vllm") is None:
            raise ConfigError(
                "--engine vllm needs the package vllm, which is not installed",
                "Install it: pip install vllm, or use --engine generate.",
            )
        if self.reward_limit is not None:
            require_range("reward_limit", self.reward_limit, 0.0, above_low=True)
        if not self.reward or len(self.reward_weights) not in (0, len(self.reward)):
            raise ConfigError(
                f"{len(self.reward_weights)} --reward-weights for {len(self.reward)} --reward",
                "Give one weight for each reward, in the same order, or none.",
            )
        if self.episodes_per_step % self.minibatches:
            raise ConfigError(
                f"--episodes-per-step {self.episodes_per_step} does not divide into "
                f"--minibatches {self.minibatches}",
                "Make the first a multiple of the second.",
            )

    def _require_clips(self) -> None:
        for name in ("clip_range", "value_clip_range", "max_approx_kl"):
            require_range(name, getattr(self, name), 0.0, above_low=True)
        for name, low in (("clip_range_high", 0.0), ("dual_clip", 1.0), ("sampler_cap", 1.0)):
            if getattr(self, name) is not None:
                require_range(name, getattr(self, name), low, above_low=True)

    def _require_kl(self) -> None:
        shortest = MAX_RELATIVE_ERROR * self.episodes_per_step
        if self.kl.target is not None and self.kl.horizon <= shortest:
            raise ConfigError(
                f"--kl.horizon is {self.kl.horizon}: the {self.episodes_per_step} responses of one "
                "step could turn the coefficient negative",
                f"Give more than {shortest:g}; 10000 is usual.",
            )
        if self.guards.max_kl and self.kl.source == "none" and not self.kl.audit_every:
            raise ConfigError(
                f"--guards.max-kl {self.guards.max_kl:g} with --kl.source none: no step measures a "
                "KL",
                "Add --kl.audit-every 10, use another --kl.source, or leave --guards.max-kl out.",
            )

    def _require_group(self) -> None:
        require_range("samples_per_prompt", self.samples_per_prompt, 1)
        require_range("lora_rank", self.lora_rank, 0)
        if self.advantages != "gae" and self.samples_per_prompt < 2:
            raise ConfigError(
                f"--advantages {self.advantages} compares the responses to one prompt, and "
                f"--samples-per-prompt is {self.samples_per_prompt}",
                "Set --samples-per-prompt to 2 or more.",
            )
        if self.episodes_per_step % self.samples_per_prompt:
            raise ConfigError(
                f"--episodes-per-step {self.episodes_per_step} does not divide into "
                f"--samples-per-prompt {self.samples_per_prompt}",
                "Make the first a multiple of the second.",
            )
        if self.has_critic and self.critic == "none":
            raise ConfigError(
                "--advantages gae needs a critic, and --critic is none",
                "Use --advantages rloo or group with --samples-per-prompt 2 or more, or --critic "
                "head.",
            )
        self._require_adapters()
        self._require_tensor_parallel(lora_rank=0, engine="generate")

    def _require_adapters(self) -> None:
        if self.share_base and not self.lora_rank:
            raise ConfigError(
                "--share-base trains adapters on one frozen model, and --lora-rank is 0",
                "Add --lora-rank 16.",
            )
        if self.four_bit_base and not self.share_base:
            raise ConfigError("--four-bit-base without --share-base", "Add --share-base.")
        if self.four_bit_base and self.kl.source == "reference":
            raise ConfigError(
                "--four-bit-base with --kl.source reference: the stored log-probs are those of the "
                "whole model, not of its 4 bits",
                "Use --kl.source adapter: the reference is then the same 4 bits without adapters.",
            )
        if self.four_bit_base and self.kl.source == "none" and self.kl.audit_every:
            raise ConfigError(
                "--four-bit-base with --kl.audit-every: the audit would compare 4 bits with the "
                "whole model",
                "Use --kl.source adapter, which measures the reverse KL in every step; with "
                "--kl.coefficient 0 it does no more than that.",
            )
        if self.kl.source == "adapter" and not self.lora_rank:
            raise ConfigError(
                "--kl.source adapter switches the policy's adapter off, and there is none",
                "Add --lora-rank 16, or use --kl.source resident.",
            )

    @property
    def holds_reference(self) -> bool:
        """Whether the policy is the original model when its adapters are switched off."""
        return self.lora_rank > 0 and not self.four_bit_base  # which is not the model in 4 bits

    @property
    def corrects_sampler(self) -> Literal["none", "token", "sequence"]:
        """What --sampler-correction comes to."""
        if self.sampler_correction != "auto":
            return self.sampler_correction
        return "none" if self.engine == "generate" else "token"

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.advantages == "gae"

    @property
    def shaping(self) -> dict[str, Any]:
        """The settings that `policies.rewards.shaping.shape_rewards` takes."""
        return {
            "shaping": self.reward_shaping,
            "missing_eos_penalty": self.missing_eos_penalty,
            "missing_eos_reward": self.missing_eos_reward,
            "length_penalty": self.length_penalty,
            "limit": self.reward_limit,
        }
