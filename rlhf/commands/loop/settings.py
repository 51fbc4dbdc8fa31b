"""The settings of `rlhf loop`: a few of its own, and a section for each command that it runs."""

from dataclasses import dataclass, field
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
from rlhf.commands.models import evaluate
from rlhf.config import read_object, require_range
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
    found = with_new_names({"stages": value}, LoopSettings)
    refuse_unknown(found, LoopSettings, "--stages")
    sections: dict[str, Any] = found["stages"]
    return sections


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Where the loop works, who ranks, and how many rounds there are."""

    SECTIONS: ClassVar[dict[str, dict[str, type[Any]]]] = {"stages": SECTIONS}

    out: Path
    """Folder of the loop: a folder for each round, and report.json."""
    model: str
    """The model to begin with: folder or hub name."""
    prompts: Annotated[tuple[Path, ...], Parameter(negative="")] = ()
    """Files of prompts to import, as `rlhf import` reads them; default: what --db holds."""
    db: Path | None = None
    """The label database. Default: labels.db in --out."""
    annotator: str = PEOPLE
    """Who ranks. `people`, with `rlhf label`; a function `signal:package.module:function`; or
    `judge`, a model whose endpoint and name the section annotate has."""
    new_rankings: int = 100
    """People: how many new rankings start the training of a round."""
    rounds: int = 3
    """Maximum number of rounds."""
    stop_without_gain: bool = True
    """Stop after a round that does not gain. A round gains if the interval of its policy's win rate
    against the policy before (in round 0: the original) lies above one half, and the sign test
    finds p below 0.05."""
    notify: str | None = None
    """URL that gets a JSON object (Slack's form) when the loop waits for people, ends or fails."""
    price_per_hour: float | None = None
    """Price of one device for an hour, in any currency, for every stage whose section has none: the
    reports then say what they cost. Default: only the device-hours."""
    stages: Annotated[
        dict[str, Any], Parameter(converter=_read_sections, n_tokens=1, accepts_keys=False)
    ] = field(default_factory=dict)
    """In the file: a section of settings for each of the commands import, generate, round,
    annotate, export, train-reward, reference, ppo and evaluate."""

    def __post_init__(self) -> None:
        require_range("new_rankings", self.new_rankings, 1)
        require_range("rounds", self.rounds, 1)
        require_range("price_per_hour", self.price_per_hour, 0)
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
