"""The groups of `rlhf ppo`'s settings, each with the checks that concern it alone; torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from policies.sampling.settings import Engine, require_engine
from rlhf.config import require_range
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """Optimizer steps of the policy."""

    learning_rate: float = 3e-6
    """Peak learning rate of the policy; it falls linearly to 0 over the run."""
    epochs: int = 1
    """Passes over the responses of a step."""
    minibatches: int = 1
    """Optimizer steps per pass; response tokens are divided evenly among them."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm, those of policy and critic separately."""
    target_kl: float = 0.2
    """Skip the rest of a step's updates once they have changed the policy by more than this
    approximate KL, ½ mean (Δ log-prob)². It limits the change within one step; --kl.target is about
    the distance from the original model."""

    def __post_init__(self) -> None:
        require_range("optim.epochs", self.epochs, 1)
        require_range("optim.minibatches", self.minibatches, 1)
        for name in ("learning_rate", "max_grad_norm", "target_kl"):
            require_range(f"optim.{name}", getattr(self, name), 0.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How many responses a step samples, and how many sequences are computed at once."""

    episodes_per_step: int = 64
    """Responses sampled per step, over all processes."""
    samples_per_prompt: int = 1
    """Responses to each prompt in a step; rloo and grpo need at least 2."""
    micro_batch_size: int = 16
    """Sequences per forward and backward pass; affects speed and memory only."""
    micro_tokens: int | None = None
    """Limit each forward and backward pass by tokens in place of sequences: sequences of similar
    length are packed with hardly any padding. Default: --batch.micro-batch-size sequences."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""

    def __post_init__(self) -> None:
        for name in ("episodes_per_step", "samples_per_prompt", "micro_batch_size"):
            require_range(f"batch.{name}", getattr(self, name), 1)
        require_range("batch.micro_tokens", self.micro_tokens, 1)
        if self.episodes_per_step % self.samples_per_prompt:
            raise ConfigError(
                f"--batch.episodes-per-step {self.episodes_per_step} does not divide into "
                f"--batch.samples-per-prompt {self.samples_per_prompt}",
                "Make the first a multiple of the second.",
            )


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The clipped policy loss and how advantages are computed."""

    clip_range: float = 0.2
    """PPO's clip: the probability ratio is held within 1 ± this."""
    clip_range_high: float | None = None
    """Upper clip of the ratio is 1 + this; default: --loss.clip-range."""
    dual_clip: float | None = None
    """Limit the loss of a token with a negative advantage to this multiple of the advantage, 3 in
    the paper; no limit when not given."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """GAE's λ: 1 is unbiased and noisy, 0 relies on the critic alone."""
    grpo_std: bool = True
    """grpo: divide advantages by the standard deviation of the prompt's rewards."""

    def __post_init__(self) -> None:
        require_range("loss.gamma", self.gamma, 0.0, 1.0)
        require_range("loss.gae_lambda", self.gae_lambda, 0.0, 1.0)
        require_range("loss.clip_range", self.clip_range, 0.0, above_low=True)
        for name, low in (("clip_range_high", 0.0), ("dual_clip", 1.0)):
            require_range(f"loss.{name}", getattr(self, name), low, above_low=True)


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The value model of `--advantages gae`; rloo and grpo have none."""

    model: Literal["own", "head"] = "own"
    """`own`: a separate model that starts as the first reward model; `head`: one linear layer on
    the policy's last hidden states, which takes hardly any memory."""
    trains: Literal["all", "head"] = "all"
    """What of the critic is trained. `head`: only its last layer, with half the memory and almost
    half the update's time; with --critic.model head the value loss then does not change the
    policy's weights."""
    warmup: bool = True
    """Fit the critic's head to the rewards of the reference outputs before the first step."""
    learning_rate: float = 1e-5
    """Peak learning rate of the critic; it falls linearly to 0 over the run."""
    coefficient: float = 0.1
    """Weight of the value loss."""
    clip_range: float = 0.2
    """Values are clipped to ± this around those of the rollout."""

    def __post_init__(self) -> None:
        require_range("critic.learning_rate", self.learning_rate, 0.0, above_low=True)
        require_range("critic.coefficient", self.coefficient, 0.0)
        require_range("critic.clip_range", self.clip_range, 0.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class RewardsSettings:
    """What becomes of reward scores before advantages are computed."""

    weights: tuple[float, ...] = ()
    """Weight of each --reward, in the same order; 1 when not given."""
    combination: Literal["sum", "mean", "worst"] = "sum"
    """Several rewards become their weighted sum, its mean, or the lowest of them."""
    shaping: Literal["centered", "par", "none"] = "centered"
    """`centered`: subtract the mean reward of the prompt's reference outputs. `par`: the mean
    probability of being preferred to them, σ of the difference."""
    missing_eos_penalty: float = 1.0
    """Subtracted from the reward of a response without an end token."""
    missing_eos_reward: float | None = None
    """Fixed reward of a response without an end token, whatever its score; the penalty is then not
    subtracted."""
    mask_truncated: bool = False
    """Leave responses cut at the length limit out of the policy and value losses. Their rewards
    still count in the baselines of rloo and grpo."""
    length_penalty: float = 0.0
    """Subtracted from the reward for every token of the response."""
    limit: float | None = None
    """Clip shaped rewards to ± this; no clipping when not given."""

    def __post_init__(self) -> None:
        require_range("rewards.limit", self.limit, 0.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Training adapters in place of all weights."""

    rank: int | None = None
    """Train a LoRA adapter of this rank in place of all weights of the policy. Default: all
    weights."""
    share_base: bool = False
    """Keep one frozen model in memory (bf16) for policy, critic and reward models, which are LoRA
    adapters on it; needs --lora.rank and reward models trained with --adapter lora."""
    four_bit_base: bool = False
    """Quantize the model of --lora.share-base to 4 bits; CUDA only."""

    def __post_init__(self) -> None:
        require_range("lora.rank", self.rank, 1)
        if self.share_base and not self.rank:
            raise ConfigError(
                "--lora.share-base trains adapters on one frozen model: it needs --lora.rank",
                "Add --lora.rank 16.",
            )
        if self.four_bit_base and not self.share_base:
            raise ConfigError(
                "--lora.four-bit-base without --lora.share-base", "Add --lora.share-base."
            )


@dataclass(frozen=True, kw_only=True)
class PtxSettings:
    """Pretraining texts in the loss (PPO-ptx), so that the policy keeps its general abilities."""

    data: Path | None = None
    """JSON Lines with `text`, or a .txt file with a text on each line; none when not given."""
    coefficient: float = 1.0
    """Weight of the texts' mean negative log-likelihood per token."""
    length: int = 256
    """Maximum tokens per chunk of text; longer texts are split."""
    per_episode: float = 1.0
    """Chunks of text in a step for each sampled response."""

    def __post_init__(self) -> None:
        require_range("ptx.coefficient", self.coefficient, 0.0)
        require_range("ptx.length", self.length, 2)
        require_range("ptx.per_episode", self.per_episode, 0.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled; temperature and lengths are those of the reference outputs."""

    engine: Engine = "generate"
    """`generate`: transformers' plain sampling. `continuous`: its continuous batching, which
    replaces finished responses by new ones, with CUDA graphs on a GPU. `vllm`: vLLM, where it is
    installed, with a copy of the policy's weights."""
    batch_size: int = 64
    """Sequences sampled at once."""
    engine_tensor_parallel: int = 1
    """With --sampling.engine vllm: neighboring processes that share one vLLM, each with a part of
    every matrix. At most the GPUs of one machine."""
    correction: Literal["auto", "none", "token", "sequence"] = "auto"
    """Correct for differences between the sampler's log-probs and the trainer's. `token`: weight
    each token's policy loss by π/μ, its probability under the trainer's policy over the sampler's,
    at most --sampling.correction-cap. `sequence`: also leave out responses whose geometric mean of
    π/μ is beyond the cap or its inverse. `auto`: `none` with --sampling.engine generate, else
    `token`."""
    correction_cap: float = 2.0
    """Largest importance weight of --sampling.correction."""

    def __post_init__(self) -> None:
        require_range("sampling.batch_size", self.batch_size, 1)
        require_range("sampling.correction_cap", self.correction_cap, 1.0, above_low=True)
        require_engine("--sampling.engine", self.engine, self.engine_tensor_parallel)


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """The KL term, which keeps the policy close to the original model."""

    source: Literal["reference", "adapter", "resident", "none"] = "reference"
    """`reference`: forward KL on the reference outputs, as a loss. `resident`: reverse KL against a
    frozen copy of the original model, subtracted from each token's reward. `adapter`: the same
    against the policy with its LoRA adapter switched off. `none`: no KL term."""
    estimator: Literal["k3", "k1", "top_k", "token_reverse"] = "k3"
    """Estimator for --kl.source reference. `k3`, `k1`: of the forward KL; `top_k`: its exact value
    on the most likely tokens (`rlhf reference --store-top-k`); `token_reverse`: the reverse KL of
    each next token."""
    coefficient: float = 0.1
    """Weight of the KL. The unit depends on --kl.source: with `reference` it weighs a loss in nats
    per stored token; with `resident` and `adapter` it is what a nat costs in the reward of each
    sampled token, and 0.02 to 0.05 is usual."""
    target: float | None = None
    """Adaptive KL: adjust the coefficient to hold the KL at this many nats per token; fixed
    coefficient when not given. With `reference` it is the forward KL, else the reverse KL."""
    horizon: int = 10_000
    """Adaptive KL: the coefficient changes by at most 20 % in this many responses. For the target
    to be reached within a run, give about a tenth of the run's responses (steps × episodes)."""
    audit_every: int | None = None
    """Measure the true reverse KL every so many steps; this loads the original model unless that is
    under the policy's adapters. Default: only after training. `adapter` and `resident` measure it
    in every step."""
    rows_per_prompt: float = 0.5
    """With --kl.source reference: how many reference outputs the KL term reads for each prompt of a
    step, at most 1."""

    def __post_init__(self) -> None:
        require_range("kl.coefficient", self.coefficient, 0.0)
        require_range("kl.audit_every", self.audit_every, 1)
        require_range("kl.horizon", self.horizon, 1)
        if self.target is not None:
            require_range("kl.target", self.target, 0.0, above_low=True)
            if self.source == "none" or self.coefficient == 0:
                raise ConfigError(
                    f"--kl.target {self.target:g} adjusts the coefficient of the KL term, and with "
                    f"--kl.source {self.source} --kl.coefficient {self.coefficient:g} there is no "
                    "such term",
                    "Leave --kl.target out, or use another --kl.source and --kl.coefficient.",
                )
        require_range("kl.rows_per_prompt", self.rows_per_prompt, 0.0, 1.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """When to warn about a step, compared with the reference outputs, and when to stop the run."""

    patience: int | None = 10
    """Consecutive steps a warning may persist before the run stops (exit code 3). none: only
    warn."""
    max_kl: float | None = None
    """Warn when the KL exceeds this many nats per token: that of the step (forward KL with
    --kl.source reference, else reverse KL) or the reverse KL of the last audit, whichever is
    larger; never when not given."""
    min_entropy: float = 0.1
    """Warn when the entropy falls below this fraction of the reference outputs'."""
    length_band: float = 3.0
    """Warn when responses are this many times longer or shorter than the reference outputs while
    the reward is above theirs."""
    eos_drop: float = 0.5
    """Warn when the fraction of responses with an end token has fallen by more than this, 0.5
    meaning 50 percentage points (from 90 % of the reference outputs to below 40 %), while the
    reward is above theirs."""
    min_distinct: float = 0.5
    """Warn when the fraction of distinct token pairs in a response falls below this fraction of
    the reference outputs' while the reward is above theirs."""

    def __post_init__(self) -> None:
        require_range("guards.patience", self.patience, 1)
        require_range("guards.max_kl", self.max_kl, 0.0, above_low=True)
        require_range("guards.min_entropy", self.min_entropy, 0.0, 1.0)
        require_range("guards.length_band", self.length_band, 1.0)
        require_range("guards.eos_drop", self.eos_drop, 0.0, 1.0)
        require_range("guards.min_distinct", self.min_distinct, 0.0, 1.0)
