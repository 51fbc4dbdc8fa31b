"""`rlhf label`: rank responses in the browser."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from policies.sampling.settings import require_sampling
from rlhf.commands.idle_settings import refuse_idle
from rlhf.commands.wording import next_command
from rlhf.config import require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError
from rlhf.records.wording import counted

EXAMPLE = "rlhf label --db labels.db"
OF_LIVE_MODE = (
    "live_responses",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "chat_template_kwargs",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which database to serve, where, and what people see."""

    ZERO_IS_NONE: ClassVar[frozenset[str]] = frozenset({"gold_every", "repeat_every"})

    db: Path
    """The label database."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines connect and needs users: rlhf users add."""
    port: int = 7860
    """Port to listen on."""
    annotator: str | None = None
    """Your name while the database has no users; default: your login name."""
    overlap: int | None = None
    """How many people rank each task. With 2 or more, the Quality page shows their agreement and
    the disputed tasks. Stored in the database, where it starts as 1."""
    another_below: float | None = None
    """With --overlap 2 or more: ask one more person to rank a task if people agree on less than
    this share of its pairs (0 to 1). Stored in the database."""
    rubric: Path | None = None
    """A Markdown file with the criteria, shown beside each task; its version is stored with each
    ranking. Stored in the database; once leads have changed it on the Rubric page, only a different
    file replaces it."""
    flags: tuple[str, ...] = ("unsafe", "untrue", "off-topic", "broken")
    """Flags that people can put on a response."""
    gold_every: int | None = 20
    """Mix in a gold task about once in this many tasks, if there are gold tasks. none: never."""
    repeat_every: int | None = None
    """Repeat an earlier task about once in this many tasks, to measure consistency. none: never."""
    max_upload_mb: int = 1000
    """Largest file that leads may upload on the Data page, in MB."""
    loop: Path | None = None
    """Settings file of `rlhf loop`: on the page /lead/runs, leads see its rounds, start and pause
    it, and promote policies. Its database must be --db."""
    model: tuple[str, ...] = ()
    """Live mode: the models that respond, as folders or hub names; the --out of `rlhf loop` stands
    for its promoted policy. With --endpoint: model names of that server."""
    endpoint: str = ""
    """Live mode: address of an OpenAI-compatible server, ending in /v1. Its key, if it needs one,
    is read from RLHF_LIVE_API_KEY."""
    live_responses: int = 2
    """Live mode: responses shown side by side, 2 to 4, spread evenly over the models."""
    temperature: float = 1.0
    """Live mode: sampling temperature."""
    top_p: float = 1.0
    """Live mode: sample from the most likely tokens that sum to this probability; 1: all."""
    top_k: int = 0
    """Live mode: sample from the k most likely tokens; 0: all."""
    max_new_tokens: int = 256
    """Live mode: maximum length of a response, in tokens."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Live mode: values passed to the chat template, e.g. '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_range("overlap", self.overlap, 1, 100)
        require_range("another_below", self.another_below, 0, 1)
        require_range("gold_every", self.gold_every, 1)
        require_range("repeat_every", self.repeat_every, 1)
        require_range("max_upload_mb", self.max_upload_mb, 1)
        require_range("live_responses", self.live_responses, 2, 4)
        require_sampling(self.temperature, self.top_p, self.top_k, self.max_new_tokens)
        if len(self.model) > self.live_responses:
            raise ConfigError(
                f"--model names {len(self.model)} models for {self.live_responses} responses",
                f"Add --live-responses {len(self.model)} (at most 4), or name fewer models.",
            )
        if not self.model and not self.endpoint:
            refuse_idle(self, OF_LIVE_MODE, "without --model or --endpoint (live mode)")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--endpoint is {self.endpoint!r}", "For example: http://localhost:8000/v1"
            )
        if self.annotator is not None and not 0 < len(self.annotator.strip()) <= 100:
            raise ConfigError(f"--annotator is {self.annotator!r}", "Give a name, for example ann.")
        from labeling_app.rankings.flags import RESERVED

        wrong = [flag for flag in self.flags if not 0 < len(flag) <= 40 or "@" in flag]
        taken = [flag for flag in self.flags if flag in RESERVED]
        if taken:
            raise ConfigError(
                f"--flags holds {taken[0]!r}, which the app sets by itself", "Choose another word."
            )
        if wrong:
            raise ConfigError(
                f"--flags holds {wrong[0]!r}", "Use words of at most 40 characters without @."
            )


def run(settings: Settings) -> dict[str, Any]:
    """Open the labeling app, where people rank responses without seeing which model wrote them."""
    from rlhf.endpoints.urls import require_free_port

    require_free_port(settings.host, settings.port)
    sys.stderr.write("Starting the board …\n")  # loading the web framework takes seconds
    sys.stderr.flush()
    from labeling_app.db.board.checks import CheckRates
    from labeling_app.db.files.label_file import refuse_other_files
    from labeling_app.web.serving import BoardOptions, LiveOptions, serve
    from policies.serving.thumbs.comparison import compare_thumbs

    refuse_other_files(settings.db)
    loop_settings, loop = _loop_of(settings)
    original = {str(loop.out): loop_settings.model} if loop else {}
    models = _live_models(settings, original)
    options = BoardOptions(
        host=settings.host,
        port=settings.port,
        annotator=settings.annotator,
        overlap=settings.overlap,
        another_below=settings.another_below,
        rubric=settings.rubric,
        flags=settings.flags,
        checks=CheckRates(
            gold_every=settings.gold_every or 0, repeat_every=settings.repeat_every or 0
        ),
        max_upload_bytes=settings.max_upload_mb * 1_000_000,
        compare=compare_thumbs,
    )
    live = LiveOptions(models=models, num_responses=settings.live_responses) if models else None
    return serve(settings.db, options, live, loop)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many rankings were made while the board was served, and how many tasks are open."""
    left = result["open_tasks"]
    new, tasks = counted(result["new_rankings"], "new ranking"), counted(left, "task")
    lines = [f"{new}; {tasks} left to rank."]
    if left:
        lines.append("Give the same command again to go on ranking.")
    if result["rankings"]:
        lines.append(next_command("export", db=settings.db, out="rankings"))
    return "\n".join(lines)


def _loop_of(settings: Settings) -> tuple[Any, Any]:
    """The settings of the loop in --loop and what its page needs of them; None without --loop."""
    if settings.loop is None:
        return None, None
    from rlhf.commands.loop.opened import read_loop_file

    loop_settings, file = read_loop_file(settings.loop)
    if loop_settings.database.resolve() != settings.db.resolve():
        raise ConfigError(
            f"--db is {settings.db}, and the loop in {settings.loop} uses {loop_settings.database}",
            f"Give --db {loop_settings.database}, or set db in the file.",
        )
    return loop_settings, file


def _live_models(settings: Settings, original: dict[str, str]) -> list[Any]:
    """The models of live mode, loaded; none without --model and --endpoint.

    `original` has the first model of a loop by the loop's folder.
    """
    from labeling_app.web.live.endpoint_model import API_KEY, EndpointModel, served_model
    from rlhf.endpoints.chat_completions import key_header
    from rlhf.records.schema import Sampling

    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
    )
    if settings.endpoint:
        key_header(API_KEY)  # a key that cannot be sent is for whoever starts this to see
        names = settings.model or (served_model(settings.endpoint),)
        return [EndpointModel(url=settings.endpoint, model=m, sampling=sampling) for m in names]
    if not settings.model:
        return []
    return [_local_model(name, sampling, settings, original) for name in settings.model]


def _local_model(name: str, sampling: Any, settings: Settings, original: dict[str, str]) -> Any:
    """A model of live mode in this process; of a loop, whichever policy is promoted."""
    from policies.sampling.promoted import PromotedModel
    from policies.sampling.streaming import LocalModel
    from rlhf.modeling.models import policy_folder
    from rlhf.run.rundir import RunDir

    given = settings.chat_template_kwargs
    first = original.get(str(Path(name)))
    if first or RunDir(Path(name)).read_stage().get("stage") == "loop":
        return PromotedModel(Path(name), sampling, given, first)
    return LocalModel(policy_folder(name, "--model"), sampling, given)
