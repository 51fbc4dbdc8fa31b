"""`rlhf serve`: a reward model, or a policy whose users give feedback, at an address."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from policies.serving.settings import Engine, KeepSettings, read_share
from reward.serving.settings import ScoringSettings
from reward.settings import require_choice
from rlhf.commands.idle_settings import refuse_idle
from rlhf.config import require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.endpoints.urls import LOOPBACK
from rlhf.errors import ConfigError
from rlhf.records.wording import counted

EXAMPLE = "rlhf serve --policy runs/first/ppo --db labels.db"
OF_POLICIES = (
    *("against", "share", "best_of", "db", "keep", "engine", "engine_flags", "endpoint"),
    *("against_endpoint", "silence_seconds"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to serve, and where."""

    OLD_NAMES: ClassVar[dict[str, str]] = {
        name: f"scoring.{name}" for name in ("combine", "micro_tokens", "max_queue", "precision")
    }

    policy: str | None = None
    """The model to serve to OpenAI clients: the --out of rlhf ppo, dpo, sft, distill, quantize or
    loop (always its promoted policy), or a model folder. With --endpoint: the model's name on that
    server; default: the only one."""
    against: str | None = None
    """A second policy, or the original model. Thumbs show which of the two users prefer."""
    share: str = "50%"
    """Share of conversations that go to --against."""
    best_of: int | None = None
    """Sample this many responses to each request and return the one with the highest --reward."""
    reward: str | None = None
    """Without --policy: the reward model or ensemble to serve; other commands then use --reward
    http://HOST:PORT. With --best-of: a reward model, function or address."""
    db: Path | None = None
    """The label database that keeps responses and takes feedback; created if it does not exist."""
    host: str = "127.0.0.1"
    """Address to serve on. 0.0.0.0 lets other machines connect; a policy then needs tokens:
    `rlhf users token NAME --db D`. A reward model has no authentication."""
    port: int = 8001
    """Port to serve on."""
    engine: Engine = "transformers"
    """Model server to start: `transformers serve` or `vllm serve`."""
    engine_flags: tuple[str, ...] = ()
    """Additional flags for that server, such as --engine-flags=--continuous-batching."""
    endpoint: str | None = None
    """Address of a server that already serves --policy, ending in /v1. Its key, if it needs one, is
    read from RLHF_SERVE_API_KEY."""
    against_endpoint: str | None = None
    """The same for --against."""
    silence_seconds: float = 300.0
    """Let a request to the model server fail after this many seconds without output."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a model that records none, e.g.
    '{"enable_thinking": false}'."""
    keep: KeepSettings = field(default_factory=KeepSettings)
    """What is kept, and for how long."""
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    """How a reward model scores."""

    @property
    def serves_policy(self) -> bool:
        """Whether a policy is served, not a reward model."""
        return self.policy is not None or self.endpoint is not None

    @property
    def compares(self) -> bool:
        """Whether two policies are compared."""
        return self.against is not None or self.against_endpoint is not None

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_choice("engine", self.engine, Engine)
        if self.serves_policy:
            self._check_policy()
        elif self.reward is not None:
            refuse_idle(self, OF_POLICIES, "without --policy or --endpoint")
            _require_model(self.reward)

    def _check_policy(self) -> None:
        require_range("best_of", self.best_of, 2, 64)
        require_range("silence_seconds", self.silence_seconds, 0, above_low=True)
        if read_share(self.share, "--share") == 1:
            raise ConfigError(f"--share is {self.share}", "Give less than 100%, or one policy.")
        for flag, url in (("endpoint", self.endpoint), ("against-endpoint", self.against_endpoint)):
            if url is not None and not url.startswith(("http://", "https://")):
                raise ConfigError(f"--{flag} is {url!r}", "For example: http://localhost:8000/v1")
        self._refuse_what_does_nothing()
        if (self.best_of is None) != (self.reward is None):
            given, missing = (
                ("--reward", "--best-of N") if self.reward else ("--best-of", "--reward RM")
            )
            raise ConfigError(f"{given} has no effect alone with --policy", f"Add {missing}.")
        if self.host not in LOOPBACK and self.db is None:
            raise ConfigError(
                f"--host is {self.host}, which other machines can reach, and there is no --db",
                "Give --db, whose tokens say who may connect: rlhf users token NAME --db DB",
            )

    def _refuse_what_does_nothing(self) -> None:
        if not self.compares:
            refuse_idle(self, ["share"], "without --against")
        if self.db is None:
            refuse_idle(self, ["keep"], "without --db")
        if self.reward is None:
            refuse_idle(self, ["scoring"], "without --reward")
        is_started = self.endpoint is None or (self.compares and self.against_endpoint is None)
        if not is_started:
            mode = "when every policy is at an --endpoint"
            refuse_idle(self, ["engine", "engine_flags", "chat_template_kwargs"], mode)


def _require_model(reward: str) -> None:
    if ":" in reward and not Path(reward).exists():
        raise ConfigError(
            f"--reward is {reward!r}, and only reward models are served",
            "Give the folder of a reward model; functions and addresses can be given to "
            "--reward of the other commands as they are.",
        )


def run(settings: Settings) -> dict[str, Any]:
    """Serve a policy to an app and collect its users' feedback, or serve a reward model to runs."""
    if settings.serves_policy:
        from rlhf.commands.serve_policy import serve_policies

        return serve_policies(settings)
    from reward.serving.serve import ServedReward, serve_reward

    if settings.reward is None:
        raise ConfigError(
            "There is nothing to serve",
            "Give a policy, --policy RUN, or a reward model, --reward RM.",
        )
    served = ServedReward(
        reward=settings.reward,
        host=settings.host,
        port=settings.port,
        scoring=settings.scoring,
        template_kwargs=settings.chat_template_kwargs,
    )
    return serve_reward(served)


def commands(settings: Settings) -> str:
    """The commands of the model servers that are started, for --dry-run."""
    if not settings.serves_policy:
        return ""
    from rlhf.commands.serve_policy import engine_commands

    return "\n".join(engine_commands(settings))


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """What was answered and kept, or scored, while the server ran."""
    if not settings.serves_policy:
        return (
            f"Scored {counted(result['responses'], 'response')} in "
            f"{counted(result['requests'], 'request')}."
        )
    failed = result["failures"]
    answered = f"Answered {counted(result['requests'] - failed, 'request')}"
    answered += f", {failed:,} failed" if failed else ""
    if settings.db is None:
        return f"{answered}; nothing was kept, as there is no --db."
    kept = f"{counted(result['kept'], 'response')} kept in {settings.db}"
    lines = [f"{answered}; {kept}; feedback: {result['feedback']}."]
    if settings.compares:
        lines.append(f"Next: rlhf status --db {shlex.quote(str(settings.db))}")
    return "\n".join(lines)
