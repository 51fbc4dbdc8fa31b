"""The settings of `rlhf quantize` and `rlhf benchmark`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from policies.sampling.settings import require_sampling
from rlhf.config import MAX_SEED, Precision, require_range
from rlhf.config.template_kwargs import TemplateKwargs

FormName = Literal["int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """What to quantize, and how much may be lost."""

    # Not keyword-only: the run is given without a flag.
    run: Annotated[str, Parameter(name="--run")] = field(kw_only=False)
    """The --out of `rlhf ppo`, `dpo`, `sft` or `train-reward`, or a model folder."""
    to: FormName
    """`int8`: 8 bits a weight, one scale a row. `int4`: 4 bits, one scale for 128 inputs (64 or 32
    where 128 does not divide them). Both quantize the weights of the linear layers alone."""
    prompts: Path
    """Held-out prompts to compare on: a folder made by `rlhf export`, whose test prompts are taken,
    or a JSON Lines file. For a reward model their responses are scored: give an export."""
    reward: str | None = None
    """Judge of a quantized policy against the unquantized one: a reward model,
    signal:package.module:function or http(s):// address."""
    out: Path
    """Folder of the run: the quantized model and the report."""
    max_loss: float = 2.0
    """Points that may be lost. With --reward: of win rate, below the 50 of two equal policies. Of a
    reward model: of pairs, which the two models order differently. More is refused (exit code
    3)."""
    max_log_prob_change: float = 0.5
    """Nats by which the log-prob of a token of the unquantized policy's answers may change on
    average. More is refused (exit code 3)."""
    num_prompts: int = 128
    """Held-out prompts to compare on, the first ones."""
    temperature: float = 1.0
    """Sampling temperature of a policy's answers."""
    max_new_tokens: int = 128
    """Length limit of a policy's answers, in tokens."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a model that records none, e.g.
    '{"enable_thinking": false}'."""
    seed: int = 0
    """Random seed of sampling and bootstrap; both policies sample with the same random numbers."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        require_range("max_loss", self.max_loss, 0, 100)
        require_range("max_log_prob_change", self.max_log_prob_change, 0)
        require_range("num_prompts", self.num_prompts, 1)
        require_range("batch_size", self.batch_size, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_sampling(self.temperature, 1.0, 0, self.max_new_tokens)
