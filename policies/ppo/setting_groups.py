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
    """End a step's updates early once they have changed the policy by more than this approximate
    KL, ½ mean (Δ log-prob)². It limits the change within one step; --kl.target controls the
    distance from the original model."""

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
    """Limit each forward and backward pass by tokens instead of sequences: sequences of similar
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
    """The clipped policy loss; discount and λ of gae."""

    clip_range: float = 0.2
    """PPO's clip range ε: moving the probability ratio beyond 1 ± ε gains nothing."""
    clip_range_high: float | None = None
    """Clip range for ratios above 1. Default: --loss.clip-range."""
    dual_clip: float | None = None
    """Dual clip: for negative advantages, cap the loss at this multiple of |advantage|. Usual: 3.
    Default: no cap."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """λ of gae. 1: no bias, high variance. 0: only the critic's estimate."""
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
    """What the critic is. `own`: a separate model that starts as the first reward model. `head`:
    one linear layer on the policy's last hidden states, which takes hardly any memory."""
    trains: Literal["all", "head"] = "all"
    """Which weights of the critic are trained. `head`: only its last layer, which halves the memory
    and almost halves the update time; with --critic.model head, the value loss then does not change
    the policy's weights."""
    warmup: bool = True
    """Fit the critic's last layer to the rewards of the reference outputs before the first step."""
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
    """How rewards are combined and transformed before advantages are computed."""

    weights: tuple[float, ...] = ()
    """Weight of each --reward, in the same order. Default: 1 each."""
    combination: Literal["sum", "mean", "worst"] = "sum"
    """How several rewards are combined, each multiplied by its weight. `sum`: added up. `mean`: the
    sum divided by the number of rewards, not by the sum of weights. `worst`: the lowest."""
    shaping: Literal["centered", "par", "none"] = "centered"
    """How the reward is transformed. `centered`: minus the mean reward of the prompt's reference
    outputs. `par`: the probability of being preferred to them, mean σ(difference). `none`:
    unchanged."""
    missing_eos_penalty: float = 1.0
    """Penalty for a response cut off at the length limit, subtracted from its reward."""
    missing_eos_reward: float | None = None
    """Reward of a response cut off at the length limit, in place of its score and the penalty."""
    mask_truncated: bool = False
    """Exclude responses cut off at the length limit from the policy and value losses. Their rewards
    still count in the baselines of rloo and grpo."""
    length_penalty: float = 0.0
    """Penalty for each token of the response, subtracted from its reward."""
    limit: float | None = None
    """Clip shaped rewards to ± this. Default: no clipping."""

    def __post_init__(self) -> None:
        require_range("rewards.limit", self.limit, 0.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters instead of all weights."""

    rank: int | None = None
    """Train a LoRA adapter of this rank, with alpha twice the rank, instead of all weights of the
    policy. Default: all weights."""
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
    """JSON Lines with `text`, or a .txt file with one text per line. Default: none."""
    coefficient: float = 1.0
    """Weight of the texts' mean negative log-likelihood per token."""
    length: int = 256
    """Maximum tokens per chunk of text; longer texts are split."""
    per_episode: float = 1.0
    """Chunks of text per sampled response of a step."""

    def __post_init__(self) -> None:
        require_range("ptx.coefficient", self.coefficient, 0.0)
        require_range("ptx.length", self.length, 2)
        require_range("ptx.per_episode", self.per_episode, 0.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled; temperature and lengths are those of the reference outputs."""

    engine: Engine = "generate"
    """Sampling engine. `generate`: transformers' plain sampling. `continuous`: its continuous
    batching, which starts new responses as others finish, with CUDA graphs on a GPU. `vllm`: vLLM,
    where it is installed, with a copy of the policy's weights."""
    batch_size: int = 64
    """Sequences sampled at once."""
    engine_tensor_parallel: int = 1
    """With --sampling.engine vllm: number of neighboring processes that share one vLLM, each with a
    part of every matrix. At most the GPUs of one machine."""
    correction: Literal["auto", "none", "token", "sequence"] = "auto"
    """Importance weights for engines whose log-probs differ from the trainer's. `token`: weight
    each token's policy loss by the ratio of the trainer's probability to the sampler's, up to a
    cap. `sequence`: also leave out responses whose mean ratio is beyond the cap. `auto`: `none`
    with --sampling.engine generate, otherwise `token`."""
    correction_cap: float = 2.0
    """Cap of the importance weights of --sampling.correction."""

    def __post_init__(self) -> None:
        require_range("sampling.batch_size", self.batch_size, 1)
        require_range("sampling.correction_cap", self.correction_cap, 1.0, above_low=True)
        require_engine("--sampling.engine", self.engine, self.engine_tensor_parallel)

    @property
    def vllm_processes(self) -> int:
        """Processes that share a vLLM; 0 where another engine samples."""
        return self.engine_tensor_parallel if self.engine == "vllm" else 0


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """The KL term, which keeps the policy close to the original model."""

    source: Literal["reference", "adapter", "resident", "none"] = "reference"
    """What the policy is compared with. `reference`: the reference outputs, as a loss, with no
    other model in memory (forward KL). `resident`: a frozen copy of the original model, as a
    penalty on each token's reward (reverse KL). `adapter`: the same, with the policy's LoRA adapter
    switched off in place of a copy. `none`: no KL term."""
    estimator: Literal["k3", "k1", "top_k", "token_reverse"] = "k3"
    """How the KL of --kl.source reference is estimated. `k3` (low variance) or `k1`: forward KL.
    `top_k`: forward KL over the most likely tokens; needs `rlhf reference --store-top-k`.
    `token_reverse`: reverse KL of the next-token distributions along the reference outputs."""
    coefficient: float = 0.1
    """Strength of the KL term: a larger one keeps the policy closer to the original model. Usual:
    0.1 to 1 with --kl.source reference, 0.02 to 0.1 with `resident` and `adapter`, whose scale
    differs."""
    target: float | None = None
    """Adaptive KL: raise or lower the coefficient to keep the KL near this many nats per token: the
    forward KL with --kl.source reference, otherwise the reverse KL. Default: fixed coefficient."""
    horizon: int = 10_000
    """Adaptive KL: number of responses over which the coefficient changes by at most 20 %. Use
    about a tenth of the run's responses (--steps times --batch.episodes-per-step)."""
    audit_every: int | None = None
    """Measure the reverse KL every N steps. Loads the original model, except for a LoRA policy.
    Default: only after training. `adapter` and `resident` measure it in every step."""
    rows_per_prompt: float = 0.5
    """With --kl.source reference: number of reference outputs in the KL term per prompt of a step.
    0.5: one for every second prompt."""

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
    """Stop the run (exit code 3) after a warning has lasted this many steps. none: only warn."""
    max_kl: float | None = None
    """Warn when the KL exceeds this many nats per token. Checks the step's KL and the last audit's.
    An audit counts until the next one: set --guards.patience above --kl.audit-every, or a single
    high audit stops the run. Default: never."""
    min_entropy: float = 0.1
    """Warn when the entropy falls below this fraction of the reference outputs'."""
    length_band: float = 3.0
    """Warn when responses are this many times longer or shorter than the reference outputs while
    rewards are above the reference outputs'."""
    eos_drop: float = 0.5
    """Warn when the share of responses that end with an end token has fallen by more than this
    (0.5: from 90 % of the reference outputs to below 40 %) while rewards are above the reference
    outputs'."""
    min_distinct: float = 0.5
    """Warn when responses become repetitive: their distinct token pairs fall below this fraction of
    the reference outputs' while rewards are above the reference outputs'."""

    def __post_init__(self) -> None:
        require_range("guards.patience", self.patience, 1)
        require_range("guards.max_kl", self.max_kl, 0.0, above_low=True)
        require_range("guards.min_entropy", self.min_entropy, 0.0, 1.0)
        require_range("guards.length_band", self.length_band, 1.0)
        require_range("guards.eos_drop", self.eos_drop, 0.0, 1.0)
        require_range("guards.min_distinct", self.min_distinct, 0.0, 1.0)
