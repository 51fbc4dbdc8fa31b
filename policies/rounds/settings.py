"""The settings of `rlhf round`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from policies.sampling.settings import Engine, require_engine
from rlhf.config import MAX_SEED, Precision, require_range


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Settings of `rlhf round`."""

    db: Path
    """The label database of all rounds."""
    policy: str
    """The newest policy: the --out of `rlhf ppo`, `dpo` or `sft`, or a model folder."""
    reference: Path
    """The --out of `rlhf reference` of the original model."""
    reward: str
    """The newest reward: reward model, signal:package.module:function or http(s):// address."""
    pick: int = 64
    """Prompts to send to the annotators."""
    k: Annotated[int, Parameter(name=("--k", "-k"))] = 3
    """Responses of the policy per prompt; one of the original model is added."""
    random_share: float = 0.2
    """Fraction of prompts drawn at random, at least 0.2, to find problems that neither criterion
    shows. Half of the rest are those on which policy and original differ most, half those on which
    the reward model is least certain."""
    engine: Engine = "generate"
    """Sampling engine. `generate`: transformers' plain sampling; `continuous`: its continuous
    batching; `vllm`: vLLM, where it is installed."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    seed: int = 0
    """Random seed of sampling and of the random prompts."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""

    def __post_init__(self) -> None:
        require_range("pick", self.pick, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("k", self.k, 1)
        require_range("random_share", self.random_share, 0.2, 1.0)
        require_range("batch_size", self.batch_size, 1)
        require_engine("--engine", self.engine)
