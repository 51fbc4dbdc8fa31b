"""`rlhf annotate`: rankings by a function or a judge model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlhf.commands.idle_settings import refuse_idle
from rlhf.commands.wording import next_command
from rlhf.config import read_text, require_range
from rlhf.errors import ConfigError
from rlhf.records.wording import counted

EXAMPLE = """rlhf annotate --db labels.db \\
    --annotator signal:examples.quickstart.sentiment:score"""
SIGNAL = "signal:"
JUDGE = "judge"
COMPARED = {"people": ("people did", "prompt"), "gold": ("its gold ranking does", "gold prompt")}
OF_JUDGES = ("endpoint", "model", "rubric", "parallel")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who ranks, and when two responses tie."""

    COMMANDS_NOW: ClassVar[dict[str, str]] = {"prioritise": "prioritize"}

    db: Path
    """The label database."""
    annotator: str
    """Who ranks: a function `signal:package.module:function` of prompt and response, or `judge`, a
    model behind --endpoint."""
    tie_within: float = 0.0
    """Signal: responses tie if their scores differ by at most this."""
    endpoint: str = ""
    """Judge: address of an OpenAI-compatible server, ending in /v1. Its key, if it needs one, is
    read from RLHF_JUDGE_API_KEY."""
    model: str = ""
    """Judge: name of the model. Its rankings are stored under the annotator judge:MODEL, of kind
    ai."""
    rubric: Path | None = None
    """Judge: a text file with the criteria to judge by."""
    parallel: int = 4
    """Judge: number of concurrent requests."""

    def __post_init__(self) -> None:
        require_range("tie_within", self.tie_within, 0)
        require_range("parallel", self.parallel, 1, 64)
        if self.annotator.startswith(SIGNAL):
            refuse_idle(self, OF_JUDGES, "with a signal")
        elif self.annotator != JUDGE:
            raise ConfigError(
                f"--annotator is {self.annotator!r}",
                "Write judge, or signal:package.module:function, for example signal:my_rules:score",
            )
        elif not self.model or not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"A judge needs --endpoint (is {self.endpoint!r}), --model (is {self.model!r})",
                "For example: --endpoint http://localhost:8000/v1 --model NAME",
            )
        else:
            refuse_idle(self, ["tie_within"], "with a judge")


def run(settings: Settings) -> dict[str, Any]:
    """Rank responses with a function or a judge model, kept apart from people's rankings."""
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
            report = annotate_with_judge(
                store, endpoint, name=name, rubric=rubric, parallel=settings.parallel
            )
        return {"annotator": name, "kind": "ai", **report}
    signal = load_signal(settings.annotator.removeprefix(SIGNAL))
    with Store(settings.db, must_exist=True) as store:
        counts = annotate_with_signal(store, settings.annotator, signal, settings.tie_within)
    return {"annotator": settings.annotator, "kind": "signal", **counts}


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many prompts were ranked, and of a judge how far it agrees with people."""
    from rlhf.run.intervals import in_words

    head = f"{result['annotator']} ranked the responses of {counted(result['ranked'], 'prompt')}"
    skipped = [
        f"{result[name]:,} {why}"
        for name, why in {
            "ranked_before": "were ranked before",
            "too_few_responses": "have fewer than two responses",
        }.items()
        if result[name]
    ]
    lines = ["; ".join([head, *skipped]) + "."]
    if result.get("unclear_pairs"):
        lines.append(f"Its verdicts on {counted(result['unclear_pairs'], 'pair')} were unreadable.")
    lines += [
        f"It orders {in_words(rate)} of the pairs as {COMPARED[name][0]}, "
        f"averaged over {counted(rate['n'], COMPARED[name][1])}."
        for name, rate in result.get("calibration", {}).items()
    ]
    return "\n".join([*lines, next_command("export", db=settings.db, out="rankings")])
