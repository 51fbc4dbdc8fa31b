"""The settings of `rlhf generate`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlhf.config import MAX_SEED, Precision, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError

Engine = Literal["generate", "continuous", "vllm"]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Settings of `rlhf generate`."""

    db: Path
    """The label database: prompts are read from it, responses are added."""
    model: str
    """Model folder or hub name."""
    k: Annotated[int, Parameter(name=("--k", "-k"))] = 4
    """Number of responses that each prompt should have."""
    only_unanswered: bool = False
    """Skip prompts that have imported responses or responses of other models."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most likely tokens that sum to this probability; 1: all.
    Below 1, responses cannot be reused as reference outputs."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all."""
    max_new_tokens: int = 256
    """Length limit of a response, in tokens."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template, e.g. '{"enable_thinking": false}'; later stages reuse
    them."""
    engine: Engine = "generate"
    """Sampling engine. `generate`: transformers' plain sampling; `continuous`: its continuous
    batching; `vllm`: vLLM, where it is installed."""
    batch_size: int = 64
    """Sequences sampled at once."""
    seed: int = 0
    """Random seed."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        require_range("k", self.k, 1)
        require_sampling(self.temperature, self.top_p, self.top_k, self.max_new_tokens)
        require_range("batch_size", self.batch_size, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_engine("--engine", self.engine)


def require_engine(flag: str, engine: Engine, tensor_parallel: int = 1) -> None:
    """Refuse vLLM where it is not installed, and sharing an engine that is not vLLM.

    Raises:
        ConfigError: says how to install it, or what to leave out.
    """
    require_range(f"{flag[2:]}_tensor_parallel", tensor_parallel, 1)
    if tensor_parallel > 1 and engine != "vllm":
        raise ConfigError(
            f"{flag}-tensor-parallel {tensor_parallel} does nothing with {flag} {engine}",
            f"Add {flag} vllm, or leave it out.",
        )
    if engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            f"{flag} vllm needs the package vllm, which is not installed",
            f"Install it: pip install vllm, or use {flag} generate.",
        )


def require_sampling(
    temperature: float, top_p: float, top_k: int, max_new_tokens: int, group: str = ""
) -> None:
    """Refuse sampling settings out of range; their names begin with `group`.

    Raises:
        ConfigError: names the setting, the value and the range.
    """
    require_range(f"{group}temperature", temperature, 0.0, above_low=True)
    require_range(f"{group}top_p", top_p, 0.0, 1.0, above_low=True)
    require_range(f"{group}top_k", top_k, 0)
    require_range(f"{group}max_new_tokens", max_new_tokens, 1)
