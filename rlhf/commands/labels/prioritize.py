"""`rlhf prioritize`: the order in which people get tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlhf.commands.wording import next_command
from rlhf.config import MAX_SEED, Precision, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.records.wording import counted

EXAMPLE = "rlhf prioritize --db labels.db --reward runs/first/reward"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which tasks come first."""

    OLD_NAMES: ClassVar[dict[str, str]] = {"tokens_per_batch": "micro_tokens"}

    db: Path
    """The label database."""
    reward: str
    """A trained reward model: the --out of `rlhf train-reward`, or a model folder."""
    by: Literal["entropy", "fisher", "delta-ucb"] = "entropy"
    """How tasks are scored. `entropy`: how uncertain the reward model is about their pairs.
    `fisher`: the information their pairs would add about the reward model's head, given earlier
    rankings (arXiv 2502.04354). `delta-ucb`: their largest plausible reward gap (arXiv
    2603.09692). Measured on people's labels, none saved labels compared with random order."""
    random_share: float = 0.2
    """Fraction of the tasks drawn at random, at least 0.2: they can reveal errors that the reward
    model cannot predict."""
    most: int = 10_000
    """Maximum number of open tasks to score; the others come after them."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a reward model that records none, e.g.
    '{"enable_thinking": false}'."""
    micro_tokens: int = 4096
    """Tokens per forward pass of the reward model; affects speed and memory only."""
    precision: Precision = "auto"
    """Precision of the reward model. bf16: autocast over float32 weights. auto: bf16 where the
    hardware has it, else fp32."""
    seed: int = 0
    """Random seed of the tasks drawn at random."""

    def __post_init__(self) -> None:
        require_range("random_share", self.random_share, 0.2, 1)
        require_range("most", self.most, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("micro_tokens", self.micro_tokens, 1)


def run(settings: Settings) -> dict[str, Any]:
    """Order the open tasks by how uncertain a reward model is about them, or by another score."""
    from labeling_app.annotators.prioritizing import prioritize
    from labeling_app.db.store import Store
    from reward.scoring.rankings import training_gain
    from reward.scoring.texts import PromptResponses, load_features
    from rlhf.parallel.distributed import start_alone

    gain = training_gain(settings.reward, first_member=True)  # the one whose features are read

    with Store(settings.db, must_exist=True) as store:
        accelerator = start_alone(settings.precision, settings.seed)
        features = load_features(
            settings.reward,
            accelerator,
            settings.micro_tokens,
            settings.chat_template_kwargs,
        )

        def read(items: Sequence[PromptResponses]) -> list[tuple[Any, Any]]:
            """Rewards as log-odds: σ of a difference is the probability that was trained."""
            return [(vectors, rewards / gain) for vectors, rewards in features(items)]

        return prioritize(
            store,
            read,
            settings.by,
            random_share=settings.random_share,
            most=settings.most,
            seed=settings.seed,
        )


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many tasks have a new place in the queue."""
    return (
        f"Ordered {counted(result['tasks'], 'open task')} by {result['by']}; {result['random']:,} "
        f"of them are drawn at random.\n{next_command('label', db=settings.db)}"
    )
