"""The settings of `rlhf loop`: a few of its own, and a section for each command that it runs."""

import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from policies.ppo.settings import PPOSettings
from policies.reference.settings import ReferenceSettings
from policies.rounds.settings import RoundSettings
from policies.sampling.settings import GenerateSettings
from reward.settings import RewardSettings
from rlhf.commands.files import refuse_unknown
from rlhf.commands.labels import annotate, export, import_
from rlhf.commands.loop.schedule import next_start
from rlhf.commands.models import evaluate
from rlhf.config import MAX_SEED, read_object, require_range
from rlhf.config.paths import with_new_names
from rlhf.errors import ConfigError

PEOPLE = "people"
SECTIONS: dict[str, type[Any]] = {
    "import": import_.Settings,
    "generate": GenerateSettings,
    "round": RoundSettings,
    "annotate": annotate.Settings,
    "export": export.Settings,
    "train-reward": RewardSettings,
    "reference": ReferenceSettings,
    "ppo": PPOSettings,
    "evaluate": evaluate.Settings,
}


def _read_sections(kind: Any, tokens: Any) -> dict[str, Any]:
    """The sections from a JSON object, as the settings file becomes one.

    Raises:
        ConfigError: it is none, or names an unknown section or setting.
    """
    example = """--stages '{"ppo": {"steps": 20}}'"""
    value = read_object("--stages", example, tokens[-1].value)
    content = with_new_names({"stages": value}, LoopSettings)
    refuse_unknown(content, LoopSettings, "--stages")
    sections: dict[str, Any] = content["stages"]
    return sections


def launch_command(launch: str | None) -> list[str]:
    """The words of --launch; none without it.

    Raises:
        ConfigError: it has no words, or a quotation mark is missing.
    """
    try:
        launcher = shlex.split(launch or "")
    except ValueError as error:
        raise ConfigError(
            f"--launch is {launch!r} ({error})", "Write it as in a shell, quotation marks in pairs."
        ) from None
    if launch is not None and not launcher:
        raise ConfigError(
            "--launch is empty", 'Give words such as "srun --gres=gpu:8", or leave it out.'
        )
    return launcher


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Where the loop works, who ranks, and how many rounds there are."""

    SECTIONS: ClassVar[dict[str, dict[str, type[Any]]]] = {"stages": SECTIONS}

    out: Path
    """Folder of the loop: a folder for each round, and report.json."""
    model: str
    """The original model: folder or hub name."""
    prompts: Annotated[tuple[Path, ...], Parameter(negative="")] = ()
    """Files of prompts to import, as `rlhf import` reads them; default: what --db holds."""
    db: Path | None = None
    """The label database. Default: labels.db in --out."""
    annotator: str = PEOPLE
    """Who ranks: `people`, with `rlhf label`; a function `signal:package.module:function`; or
    `judge`, a judge model, configured under stages: annotate."""
    new_rankings: int | None = 100
    """People: start the training of a round after this many new rankings. none: only --start-at
    starts it. Prompts imported without responses in the meantime get some from --model."""
    start_at: str | None = None
    """People: also start the training of a round at a time of day ("02:00") or "every 6 hours"
    since the round began, even with fewer new rankings than --new-rankings, but with at least
    one."""
    rounds: int = 3
    """Maximum number of rounds."""
    stop_without_gain: bool = True
    """Stop after a round that does not gain. A round gains if the interval of its policy's win rate
    against the previous policy (in round 0: the original) lies above one half and the sign test
    finds p below 0.05."""
    launch: str | None = None
    """Prefix for the commands train-reward, reference, ppo and evaluate, which work in a folder of
    their own, such as `srun --gres=gpu:8`. No shell interprets it. The other commands use the
    database and run on this machine."""
    lead_may: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Settings that leads may change on the Runs page of `rlhf label --loop`: numbers, switches and
    choices, such as new_rankings or stages.ppo.steps."""
    notify: str | None = None
    """Webhook URL that receives a JSON message (Slack's format) when the loop waits for people,
    ends or fails."""
    seed: int | None = None
    """Random seed of every stage whose section sets none. Default: 0."""
    price_per_hour: float | None = None
    """Price per device-hour, in any currency, for every stage whose section sets none; adds costs
    to the reports. Default: report device-hours only."""
    stages: Annotated[
        dict[str, Any], Parameter(converter=_read_sections, n_tokens=1, accepts_keys=False)
    ] = field(default_factory=dict)
    """In the file: a section of settings for each of the commands import, generate, round,
    annotate, export, train-reward, reference, ppo and evaluate."""

    def __post_init__(self) -> None:
        require_range("new_rankings", self.new_rankings, 1)
        require_range("rounds", self.rounds, 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("price_per_hour", self.price_per_hour, 0)
        if self.start_at is not None:
            next_start(self.start_at, datetime.now(UTC))
            if not self.waits_for_people:
                raise ConfigError(
                    f"--start-at has no effect with {self.annotator}, which ranks at once",
                    "Leave it out.",
                )
        elif self.waits_for_people and self.new_rankings is None:
            raise ConfigError(
                "--new-rankings is none, and there is no --start-at",
                "Give one of them: no round would start.",
            )
        launch_command(self.launch)
        if self.annotator not in (PEOPLE, "judge") and not self.annotator.startswith("signal:"):
            raise ConfigError(
                f"--annotator is {self.annotator!r}",
                "Write people, judge, or signal:package.module:function.",
            )
        if self.notify and not self.notify.startswith(("http://", "https://")):
            raise ConfigError(
                f"--notify is {self.notify!r}", "Give a URL that starts with http:// or https://."
            )

    @property
    def database(self) -> Path:
        """The label database."""
        return self.db or self.out / "labels.db"

    @property
    def waits_for_people(self) -> bool:
        """Whether people rank, rather than a function or a model."""
        return self.annotator == PEOPLE

    def round_folder(self, number: int) -> Path:
        """The folder of a round; the first is round 0."""
        return self.out / f"round-{number}"
