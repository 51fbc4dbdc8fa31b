"""The settings of `rlhf evaluate`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from policies.sampling.settings import Engine, require_engine
from rlhf.config import MAX_SEED, Precision, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Which models are compared, and which judges compare them."""

    policy: str
    """The --out of rlhf ppo, dpo, sft, distill, quantize or loop (its promoted policy), or a model
    folder."""
    reference: Path
    """The --out of `rlhf reference`."""
    reward: str
    """A judge: reward model, signal:package.module:function or http(s):// address."""
    out: Path
    """Folder for the report and the responses."""
    against: str | None = None
    """Another policy or model to compare --policy with, on the same prompts."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a --policy or --against that records none, e.g.
    '{"enable_thinking": false}'."""
    gold: str | None = None
    """An independent judge: reward model, signal:package.module:function or http(s):// address."""
    judge_endpoint: str = ""
    """An additional judge: address of an OpenAI-compatible server, ending in /v1."""
    judge_model: str = ""
    """Name of the model on --judge-endpoint; its API key is read from RLHF_JUDGE_API_KEY."""
    judge_rubric: Path | None = None
    """A text file with the criteria for the judge model."""
    judge_parallel: int = 4
    """Number of concurrent requests to --judge-endpoint."""
    retain: Path | None = None
    """Neutral text on which the increase in NLL is measured: a .txt file with a blank line between
    paragraphs, or JSON Lines with `text`. Default: 20 paragraphs of neutral English prose."""
    split: Literal["test", "train"] = "test"
    """Which prompts to evaluate on; `test` prompts were not trained on."""
    samples: int = 4
    """Responses of the policy per prompt."""
    engine: Engine = "generate"
    """Sampling engine. `generate`: transformers' plain sampling; `continuous`: its continuous
    batching; `vllm`: vLLM, where it is installed."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    seed: int = 0
    """Random seed of sampling and bootstrap."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""
    price_per_hour: float | None = None
    """Price per device-hour, in any currency; adds to the report what this evaluation and the
    stages before it cost, also per point of win rate. Default: report device-hours only."""
    resume: bool = False
    """Continue an unfinished --out; if it is finished, print its result."""

    def __post_init__(self) -> None:
        require_range("samples", self.samples, 1)
        require_range("price_per_hour", self.price_per_hour, 0)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("batch_size", self.batch_size, 1)
        require_engine("--engine", self.engine)
        require_range("judge_parallel", self.judge_parallel, 1, 64)
        wants_judge = bool(self.judge_endpoint or self.judge_model or self.judge_rubric)
        has_judge = bool(self.judge_model) and self.judge_endpoint.startswith(
            ("http://", "https://")
        )
        if wants_judge and not has_judge:
            raise ConfigError(
                f"A judge needs --judge-endpoint (is {self.judge_endpoint!r}) and --judge-model "
                f"(is {self.judge_model!r})",
                "For example: --judge-endpoint http://localhost:8000/v1 --judge-model NAME",
            )
