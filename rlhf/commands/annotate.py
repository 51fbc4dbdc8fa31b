"""`rlhf annotate`: rankings by a function or by a judge model, kept apart from people's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import require_range
from rlhf.errors import ConfigError, InputError

SIGNAL = "signal:"
JUDGE = "judge"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who annotates, and when two responses tie."""

    db: Path
    """The label database."""
    annotator: str
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

    def __post_init__(self) -> None:
        require_range("tie_within", self.tie_within, 0)
        require_range("parallel", self.parallel, 1, 64)
        if self.annotator == JUDGE:
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
    """Rank the responses by a function or a judge model; its rankings never pass for human."""
    from labeling_app.annotating import annotate_with_signal
    from labeling_app.judging import Endpoint, annotate_with_judge
    from labeling_app.store import Store
    from rlhf.signals import load_signal

    if settings.annotator == JUDGE:
        name = f"judge:{settings.model}"
        endpoint = Endpoint(url=settings.endpoint, model=settings.model)
        rubric = _read(settings.rubric)
        with Store(settings.db, must_exist=True) as store:
            found = annotate_with_judge(
                store, endpoint, name=name, rubric=rubric, parallel=settings.parallel
            )
        return {"annotator": name, "kind": "ai", **found}
    signal = load_signal(settings.annotator.removeprefix(SIGNAL))
    with Store(settings.db, must_exist=True) as store:
        counts = annotate_with_signal(store, settings.annotator, signal, settings.tie_within)
    return {"annotator": settings.annotator, "kind": "signal", **counts}


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    if not path.is_file():
        raise InputError(f"No such rubric: {path}", "Give --rubric a text file.")
    return path.read_text(encoding="utf-8")
