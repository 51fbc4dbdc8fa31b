"""The settings of `rlhf round`; torch-free, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlhf.config import MAX_SEED, Precision, require_range


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Whose samples go back to the annotators, and which."""

    db: Path
    """The label database of all rounds."""
    policy: str
    """The newest policy: the --out of `rlhf ppo` or `rlhf sft`, or a model folder."""
    reference: Path
    """The --out of `rlhf reference` of the original model."""
    reward: str
    """The newest reward model, signal:package.module:function or address."""
    pick: int = 64
    """Prompts to send to the annotators."""
    k: Annotated[int, Parameter(name=("--k", "-k"))] = 3
    """Samples of the policy per prompt; one answer of the original stands beside them."""
    random_share: float = 0.2
    """Share of prompts drawn at random, at least .2: chance finds what no model knows of. Of the
    rest half are the most divergent, half uncertain."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    seed: int = 0
    """Random seed of sampling and of what is drawn."""
    precision: Precision = "auto"
    """bf16 autocast where the hardware has it (auto), always (bf16) or never (fp32)."""

    def __post_init__(self) -> None:
        require_range("pick", self.pick, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("k", self.k, 1)
        require_range("random_share", self.random_share, 0.2, 1.0)
        require_range("batch_size", self.batch_size, 1)
