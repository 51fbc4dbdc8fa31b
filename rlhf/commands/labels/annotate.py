"""`rlhf annotate`: rankings by a function or a judge, or the order in which people get tasks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from reward.settings import Precision
from rlhf.config import MAX_SEED, read_text, require_range
from rlhf.errors import ConfigError
from rlhf.modeling.template_kwargs import TemplateKwargs

SIGNAL = "signal:"
JUDGE = "judge"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who annotates, and when two responses tie; or what people should rank first."""

    db: Path
    """The label database."""
    annotator: str = ""
    """signal:package.module:function, which gets prompt and response; or judge."""
    tie_within: float = 0.0
    """Signals: responses whose scores differ by no more than this tie."""
    endpoint: str = ""
    """Judge: address of an OpenAI-compatible server, ending in /v1; key in RLHF_JUDGE_API_KEY."""
    model: str = ""
    """Judge: the model that judges; it is stored as annotator judge:MODEL, of kind ai."""
    rubric: Path | None = None
    """Judge: a text file that says what to judge by."""
    parallel: int = 4
    """Judge: questions asked at the same time."""
    prioritise: bool = False
    """Rank nothing; put first in the queue what --reward would learn most from."""
    reward: str = ""
    """Prioritise: a trained reward model."""
    by: Literal["fisher", "entropy", "delta-ucb"] = "fisher"
    """Prioritise: what the head would learn, unsure pairs, or large plausible gaps."""
    random_share: float = 0.2
    """Prioritise: share of the queue drawn at random, for what the model does not know of."""
    most: int = 10_000
    """Prioritise: open tasks to look at; the others come after them."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Prioritise: values passed to the chat template of a reward model that records none, e.g.
    '{"enable_thinking": false}'."""
    tokens_per_batch: int = 4096
    """Prioritise: tokens in one forward pass of the reward model."""
    precision: Precision = "auto"
    """Prioritise: of the reward model; bf16 is autocast over float32 weights."""
    seed: int = 0
    """Prioritise: of what is drawn at random."""

    def __post_init__(self) -> None:
        require_range("tie_within", self.tie_within, 0)
        require_range("parallel", self.parallel, 1, 64)
        require_range("random_share", self.random_share, 0.2, 1)
        require_range("most", self.most, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("tokens_per_batch", self.tokens_per_batch, 1)
        if self.prioritise:
            if self.annotator or not self.reward:
                raise ConfigError(
                    f"--prioritise needs --reward (is {self.reward!r}) and no --annotator "
                    f"(is {self.annotator!r})",
                    "For example: rlhf annotate --db labels.db --prioritise --reward runs/a/reward",
                )
        elif self.annotator == JUDGE:
            if not self.model or not self.endpoint.startswith(("http://", "https://")):
                raise ConfigError(
                    f"A judge needs --endpoint (is {self.endpoint!r}), --model (is {self.model!r})",
                    "For example: --endpoint http://localhost:8000/v1 --model NAME",
                )
        elif not self.annotator.startswith(SIGNAL):
            raise ConfigError(
                f"--annotator is {self.annotator!r}",
                "Write judge, or signal:package.module:function, for example signal:my_rules:score",
            )


def run(settings: Settings) -> dict[str, Any]:
    """Rank by a function or a judge model, never as a person; or order the queue (--prioritise)."""
    if settings.prioritise:
        return _prioritise(settings)
    from labeling_app.annotators.judges import annotate_with_judge
    from labeling_app.annotators.signals import annotate_with_signal
    from labeling_app.db.store import Store
    from rlhf.endpoints.judge import Endpoint
    from rlhf.endpoints.signals import load_signal

    if settings.annotator == JUDGE:
        name = f"judge:{settings.model}"
        endpoint = Endpoint(url=settings.endpoint, model=settings.model)
        rubric = read_text(settings.rubric, "--rubric")
        with Store(settings.db, must_exist=True) as store:
            found = annotate_with_judge(
                store, endpoint, name=name, rubric=rubric, parallel=settings.parallel
            )
        return {"annotator": name, "kind": "ai", **found}
    signal = load_signal(settings.annotator.removeprefix(SIGNAL))
    with Store(settings.db, must_exist=True) as store:
        counts = annotate_with_signal(store, settings.annotator, signal, settings.tie_within)
    return {"annotator": settings.annotator, "kind": "signal", **counts}


def _prioritise(settings: Settings) -> dict[str, Any]:
    from labeling_app.annotators.prioritizing import prioritise
    from labeling_app.db.store import Store
    from reward.scoring.texts import load_features
    from rlhf.parallel.distributed import start_alone

    with Store(settings.db, must_exist=True) as store:
        accelerator = start_alone(settings.precision, settings.seed)
        return prioritise(
            store,
            load_features(
                settings.reward,
                accelerator,
                settings.tokens_per_batch,
                settings.chat_template_kwargs,
            ),
            settings.by,
            random_share=settings.random_share,
            most=settings.most,
            seed=settings.seed,
        )
