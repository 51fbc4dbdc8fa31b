"""The settings of generate, reference, ppo and evaluate; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlhf.config import require_range
from rlhf.errors import ConfigError

Precision = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Settings of `rlhf generate`."""

    db: Path
    """The label database; prompts come from it, responses go into it."""
    model: str
    """Model folder or hub name."""
    k: Annotated[int, Parameter(name=("--k", "-k"))] = 4
    """Responses per prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling; responses made with less than 1 cannot serve as reference outputs."""
    top_k: int = 0
    """Sample from the k likeliest tokens only; 0 is off."""
    max_new_tokens: int = 256
    """Length limit of a response, in tokens."""
    batch_size: int = 64
    """Sequences sampled at once."""
    seed: int = 0
    """Random seed."""
    precision: Precision = "auto"
    """bf16 autocast where the hardware has it (auto), always (bf16) or never (fp32)."""

    def __post_init__(self) -> None:
        require_range("k", self.k, 1)
        require_sampling(self.temperature, self.top_p, self.top_k, self.max_new_tokens)
        require_range("batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """Settings of `rlhf reference`."""

    prompts: Path
    """A folder made by `rlhf export`, or a JSON Lines file of prompts."""
    model: str
    """The original model: folder or hub name."""
    out: Path
    """Folder of this stage."""
    reward: str | None = None
    """Reward model whose scores of the reference outputs are stored with them."""
    samples: int = 1
    """Reference outputs per prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_new_tokens: int = 256
    """Length limit of a response, in tokens."""
    reuse: bool = True
    """Take responses of the same model and sampling settings from the export."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    prompts_per_shard: int = 512
    """Prompts per Parquet file; a resumed run repeats at most one file per process."""
    seed: int = 0
    """Random seed."""
    precision: Precision = "auto"
    """bf16 autocast where the hardware has it (auto), always (bf16) or never (fp32)."""
    processes: int = 1
    """Processes to start on this machine."""
    resume: bool = False
    """Go on with an unfinished --out."""

    def __post_init__(self) -> None:
        require_range("samples", self.samples, 1)
        require_sampling(self.temperature, 1.0, 0, self.max_new_tokens)
        require_range("batch_size", self.batch_size, 1)
        require_range("prompts_per_shard", self.prompts_per_shard, 1)
        require_range("processes", self.processes, 1)


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """The brake that keeps the policy near the original model."""

    source: Literal["reference", "none"] = "reference"
    """`reference`: forward KL on the stored reference outputs; `none`: no KL term."""
    coefficient: float = 0.1
    """Weight of the forward KL, in nats per token (mean over stored tokens)."""
    rows_per_episode: float = 0.5
    """Stored rows in the KL term for each sampled response, at most 1."""

    def __post_init__(self) -> None:
        require_range("kl.coefficient", self.coefficient, 0.0)
        require_range("kl.rows_per_episode", self.rows_per_episode, 0.0, 1.0, above_low=True)


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """Settings of `rlhf ppo`."""

    model: str
    """The model to train: the one that the reference outputs came from."""
    reward: str
    """Reward model: the --out of `rlhf train-reward`, or a Hugging Face folder with one label."""
    reference: Path
    """The --out of `rlhf reference`."""
    out: Path
    """Folder of this stage."""
    steps: int = 100
    """Rounds of sampling and updating."""
    episodes_per_step: int = 64
    """Responses sampled per step, over all processes."""
    epochs: int = 1
    """Passes over the episodes of a step."""
    minibatches: int = 1
    """Optimizer steps per pass."""
    micro_batch_size: int = 16
    """Sequences in one forward and backward; changes speed and memory only."""
    learning_rate: float = 3e-6
    """Peak learning rate of the policy, annealed to 0."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of the critic, annealed to 0."""
    max_grad_norm: float = 1.0
    """Gradient clipping, policy and critic each."""
    clip_range: float = 0.2
    """PPO's clip of the probability ratio."""
    value_clip_range: float = 0.2
    """Clip of the value's change in one update."""
    value_coefficient: float = 0.1
    """Weight of the value loss."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """GAE's λ: 1 is unbiased and noisy, 0 trusts the critic."""
    max_approx_kl: float = 0.2
    """Stop a step's updates when ½ mean (Δ log-prob)² exceeds this."""
    reward_shaping: Literal["centered", "none"] = "centered"
    """`centered`: minus the mean reward of the prompt's stored reference outputs."""
    missing_eos_penalty: float = 1.0
    """Taken from the reward of a response that did not end by itself."""
    kl: KLSettings = field(default_factory=KLSettings)
    """The KL term."""
    sample_batch_size: int = 64
    """Sequences sampled at once."""
    save_every: int = 25
    """Steps between checkpoints."""
    keep_checkpoints: int = 1
    """Checkpoints kept on disk."""
    seed: int = 0
    """Random seed."""
    precision: Precision = "auto"
    """bf16 autocast where the hardware has it (auto), always (bf16) or never (fp32)."""
    processes: int = 1
    """Processes to start on this machine."""
    resume: bool = False
    """Go on with an unfinished --out."""

    def __post_init__(self) -> None:
        for name in ("steps", "episodes_per_step", "epochs", "minibatches", "micro_batch_size"):
            require_range(name, getattr(self, name), 1)
        for name in ("sample_batch_size", "save_every", "keep_checkpoints", "processes"):
            require_range(name, getattr(self, name), 1)
        for name in ("learning_rate", "critic_learning_rate", "max_grad_norm", "clip_range"):
            require_range(name, getattr(self, name), 0.0, above_low=True)
        for name in ("value_clip_range", "max_approx_kl"):
            require_range(name, getattr(self, name), 0.0, above_low=True)
        require_range("value_coefficient", self.value_coefficient, 0.0)
        require_range("gamma", self.gamma, 0.0, 1.0)
        require_range("gae_lambda", self.gae_lambda, 0.0, 1.0)
        if self.episodes_per_step % self.minibatches:
            raise ConfigError(
                f"--episodes-per-step {self.episodes_per_step} does not divide into "
                f"--minibatches {self.minibatches}",
                "Make the first a multiple of the second.",
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Settings of `rlhf evaluate`."""

    policy: str
    """The --out of `rlhf ppo`, or a model folder."""
    reference: Path
    """The --out of `rlhf reference`."""
    reward: str
    """Reward model that judges."""
    out: Path
    """Folder of this stage."""
    gold: str | None = None
    """A function `package.module:function` of (prompt, response) that judges besides."""
    split: Literal["test", "train"] = "test"
    """Which prompts to answer; those of `test` were never trained on."""
    samples: int = 4
    """Responses of the policy per prompt."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    seed: int = 0
    """Random seed of sampling and bootstrap."""
    precision: Precision = "auto"
    """bf16 autocast where the hardware has it (auto), always (bf16) or never (fp32)."""
    resume: bool = False
    """Show the result of an --out that is finished, run one that is not."""

    def __post_init__(self) -> None:
        require_range("samples", self.samples, 1)
        require_range("batch_size", self.batch_size, 1)


def require_sampling(temperature: float, top_p: float, top_k: int, max_new_tokens: int) -> None:
    """Refuse sampling settings out of range.

    Raises:
        ConfigError: names the setting, the value and the range.
    """
    require_range("temperature", temperature, 0.0, above_low=True)
    require_range("top_p", top_p, 0.0, 1.0, above_low=True)
    require_range("top_k", top_k, 0)
    require_range("max_new_tokens", max_new_tokens, 1)
