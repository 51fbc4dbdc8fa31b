"""The settings of `rlhf quantize` and `rlhf benchmark`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from policies.sampling.settings import Engine, require_engine, require_sampling
from rlhf.config import MAX_SEED, Precision, flag_of, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError

FormName = Literal["int8", "int4"]
OF_POLICIES = ("samples", "temperature", "max_new_tokens", "max_log_prob_change")
Sizes = Annotated[tuple[int, ...], Parameter(negative="")]


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """What to quantize, and how much may be lost."""

    # Not keyword-only: the run is given without a flag.
    run: Annotated[str, Parameter(name="--run")] = field(kw_only=False)
    """The --out of rlhf ppo, dpo, sft, distill or train-reward, or a model folder."""
    to: FormName
    """`int8`: 8 bits per weight, one scale per row. `int4`: 4 bits, one scale per 128 inputs (64 or
    32 where 128 does not divide them). Both quantize only the weights of linear layers."""
    prompts: Path
    """Held-out prompts to compare on: the test prompts of a folder written by `rlhf export`, or a
    JSON Lines file, of which only the lines with split test are used if it has any. A reward model
    scores their responses: give an export."""
    reward: str | None = None
    """Judge of a quantized policy against the unquantized one: a reward model,
    signal:package.module:function or http(s):// address."""
    out: Path
    """Folder of the run: the quantized model and the report."""
    max_loss: float = 2.0
    """Maximum loss in points; more is refused (exit code 3). With --reward: points of win rate
    below the 50 of two equal policies. For a reward model: percentage of pairs that the two models
    order differently."""
    max_log_prob_change: float = 0.5
    """Maximum mean change of a token's log-prob in the unquantized policy's responses, in nats;
    more is refused (exit code 3)."""
    num_prompts: int = 128
    """How many held-out prompts to compare on; the first ones are used."""
    samples: int = 4
    """Responses of each policy per prompt."""
    temperature: float = 1.0
    """Sampling temperature of a policy's responses."""
    max_new_tokens: int = 128
    """Length limit of a policy's responses, in tokens."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a model that records none, e.g.
    '{"enable_thinking": false}'."""
    seed: int = 0
    """Random seed of sampling and bootstrap."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""
    price_per_hour: float | None = None
    """Price per device-hour, in any currency; adds the run's cost to the report. Default: report
    device-hours only."""

    def __post_init__(self) -> None:
        require_range("price_per_hour", self.price_per_hour, 0)
        require_range("samples", self.samples, 1)
        require_range("max_loss", self.max_loss, 0, 100)
        require_range("max_log_prob_change", self.max_log_prob_change, 0)
        require_range("num_prompts", self.num_prompts, 1)
        require_range("batch_size", self.batch_size, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_sampling(self.temperature, 1.0, 0, self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """Which models to measure, on which work."""

    # Not keyword-only: runs are given without a flag.
    runs: Annotated[tuple[str, ...], Parameter(name="--runs", negative="")] = field(kw_only=False)
    """Runs of rlhf ppo, dpo, sft, distill, quantize or train-reward, or model folders. Policies
    generate, reward models score."""
    out: Path
    """Folder for the report."""
    batch_sizes: Sizes = (1, 8, 32)
    """Batch sizes, in prompts to respond to or sequences to score."""
    prompt_tokens: Sizes = (128,)
    """Lengths of prompts, in tokens."""
    answer_tokens: Sizes = (64,)
    """Lengths of responses, in tokens; every response has exactly this length."""
    repeats: int = 5
    """Batches measured for each size, after one whole batch that is not counted."""
    engine: Engine = "generate"
    """Sampling engine. `generate`: transformers' plain sampling; `continuous`: its continuous
    batching; `vllm`: vLLM, where it is installed."""
    price_per_hour: float | None = None
    """Price of this machine per hour, in any currency; adds prices to the report, and the cost of
    the measurement itself."""
    seed: int = 0
    """Random seed of the prompts and of sampling."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("No model to measure", "Name one: rlhf benchmark runs/first/ppo …")
        for name in ("batch_sizes", "prompt_tokens", "answer_tokens"):
            sizes = getattr(self, name)
            if not sizes:
                raise ConfigError(f"{flag_of(name)} is empty", f"Give one: {flag_of(name)} 8")
            for size in sizes:
                require_range(name, size, 1)
        require_range("repeats", self.repeats, 1)
        require_range("price_per_hour", self.price_per_hour, 0, above_low=True)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_engine("--engine", self.engine)
