"""The commands of a round, in order, each with the settings that the loop and the file give it.

A command's own section of the file goes into round-N/settings/COMMAND.yaml, which the command
reads with --config; what the loop gives is on the command line, where it can be read and repeated.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError

from rlhf.commands.files import settings_from_values
from rlhf.commands.loop.settings import SECTIONS, LoopSettings, launch_command
from rlhf.commands.parse_errors import explain
from rlhf.config import setting_names, to_plain, to_yaml
from rlhf.config.paths import flag_of
from rlhf.errors import ConfigError
from rlhf.records.jsonl import write_text_atomically
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import FOLDER_VARIABLE

# Commands that have a run folder and leave the database alone.
WITH_RUN_FOLDER = ("train-reward", "reference", "ppo", "evaluate")
# Settings with which a command would do something else than its part of a round.
NOT_IN_A_LOOP = {
    "export": ("format",),
    "reference": ("inspect", "replace_reward", "shard"),
    "evaluate": ("from_db",),
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command of a round.

    Args:
        number: of the round.
        name: of the command.
        given: settings that the loop gives, by name.
        section: settings of the file.
        folder: of the round.
    """

    number: int
    name: str
    given: Mapping[str, Any]
    section: Mapping[str, Any]
    folder: Path

    @property
    def out(self) -> Path | None:
        """The folder that the command makes; None where it works on the database."""
        return self.given.get("out")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its process besides the loop's."""
        if self.name in WITH_RUN_FOLDER:  # it reports there
            return {}
        folder = RunDir(self.folder / self.name).heartbeat
        return {FOLDER_VARIABLE: str(folder.absolute())}

    @property
    def arguments(self) -> list[str]:
        """What follows `rlhf` on the command line."""
        arguments = [self.name, *map(str, self.given.get("files", ()))]
        if self.section:
            arguments += ["--config", str(self._settings_file)]
        for name, value in self.given.items():
            if name != "files":
                arguments += [flag_of(name)] if value is True else [flag_of(name), str(value)]
        return arguments

    @property
    def command(self) -> str:
        """The command line, to copy into a shell."""
        return shlex.join(["rlhf", *self.arguments])

    @property
    def _settings_file(self) -> Path:
        return self.folder / "settings" / f"{self.name}.yaml"

    def write_settings(self) -> None:
        """Write the file that --config names."""
        if self.section:
            text = to_yaml(dict(self.section))
            write_text_atomically(self._settings_file, lambda stream: stream.write(text))

    def settings(self) -> Any:
        """The settings that the command will have.

        Raises:
            ConfigError: one of them is missing, or has a wrong type or value.
        """
        values = {**self.section, **{name: to_plain(value) for name, value in self.given.items()}}
        source = f"stages.{self.name}"
        try:
            return settings_from_values(values, SECTIONS[self.name], source)
        except CycloptsError as error:
            problem = explain(error, [self.name], [], SECTIONS[self.name])
        except ConfigError as error:
            problem = error
        problems = problem.problem if source in problem.problem else f"{source}: {problem.problem}"
        raise ConfigError(problems, problem.remedy) from None


def launch_of(settings: LoopSettings, stage: Stage) -> list[str]:
    """The words of --launch that stand before a command."""
    return launch_command(settings.launch) if stage.name in WITH_RUN_FOLDER else []


def stages_of_round(settings: LoopSettings, number: int) -> list[Stage]:
    """The commands of a round; where people rank, they do so before `export`.

    Round 0 begins with the model as it is. A later one begins with the policy of the round before,
    trains its reward model from the first model on the rankings of all rounds, and is compared with
    the first model and with the policy before.
    """
    folder = settings.round_folder(number)
    given = _given(settings, number)
    absent = {"round"} if number == 0 else {"import", "generate"}
    absent |= set() if settings.prompts else {"import"}
    absent |= {"annotate"} if settings.waits_for_people else set()
    stages = []
    for name in SECTIONS:
        if name not in absent:
            section = {k.replace("-", "_"): v for k, v in settings.stages.get(name, {}).items()}
            usual = {k: v for k, v in _usual(settings, name).items() if k not in section}
            both = {**given[name], **usual}
            stages.append(
                Stage(number=number, name=name, given=both, section=section, folder=folder)
            )
    return stages


def set_by_loop(settings: LoopSettings, stage: Stage) -> Mapping[str, Any]:
    """The settings of a command that only the loop may set."""
    return _given(settings, stage.number)[stage.name]


def _given(settings: LoopSettings, number: int) -> dict[str, dict[str, Any]]:
    """By command, the settings that only the loop may set."""
    here, before, first = (
        settings.round_folder(round_number) for round_number in (number, number - 1, 0)
    )
    rankings, reward, reference, ppo, out = (
        here / name for name in ("rankings", "reward", "reference", "ppo", "evaluate")
    )
    db, base, original = settings.database, settings.model, first / "reference"
    model = before / "ppo" / "policy" if number else base
    given: dict[str, dict[str, Any]] = {
        "import": {"files": settings.prompts, "db": db},
        "generate": {"db": db, "model": base},
        "round": {"db": db, "policy": before / "ppo", "reference": original},
        "annotate": {"db": db, "annotator": settings.annotator},
        "export": {"db": db, "out": rankings},
        "train-reward": {"rankings": rankings, "model": base, "out": reward},
        "reference": {"prompts": rankings, "model": model, "reward": reward, "out": reference},
        "ppo": {"model": model, "reward": reward, "reference": reference, "out": ppo},
        "evaluate": {"policy": ppo, "reference": original, "reward": reward, "out": out},
    }
    given["round"]["reward"] = before / "reward"
    if number:
        given["evaluate"]["against"] = before / "ppo"
    for name in WITH_RUN_FOLDER:
        given[name]["resume"] = True
    return given


def _usual(settings: LoopSettings, name: str) -> dict[str, Any]:
    """Settings that the loop gives a command unless its section has them."""
    kind = {"people": "human", "judge": "ai"}.get(settings.annotator, "signal")
    usual: dict[str, dict[str, Any]] = {"export": {"kind": kind}}
    if settings.waits_for_people and settings.new_rankings:
        usual["round"] = {"pick": settings.new_rankings}
    if kind == "signal":
        usual["evaluate"] = {"gold": settings.annotator}
    price = settings.price_per_hour
    priced = {"price_per_hour": price} if name in WITH_RUN_FOLDER and price is not None else {}
    has_seed = settings.seed is not None and "seed" in setting_names(SECTIONS[name])
    seeded = {"seed": settings.seed} if has_seed else {}
    return {**usual.get(name, {}), **seeded, **priced}


def require_valid(settings: LoopSettings) -> None:
    """Check the settings of every command before the first one runs.

    Raises:
        ConfigError: a section has no effect, sets what the loop sets, or has a wrong value.
    """
    stages = [*stages_of_round(settings, 0), *stages_of_round(settings, 1)]
    names = {stage.name for stage in stages}
    for name in settings.stages:
        if name not in names:
            mode = "without prompts" if name == "import" else f"with {settings.annotator}"
            raise ConfigError(f"stages.{name} has no effect {mode}", "Delete the section.")
    for stage in stages:
        given = set_by_loop(settings, stage)
        for key in stage.section:
            if key == "notify":
                raise ConfigError(
                    f"stages.{stage.name}.notify is set for one stage",
                    "Set notify at the top of the file, for the whole loop.",
                )
            if key in given:
                raise ConfigError(
                    f"rlhf loop sets stages.{stage.name}.{key} itself", "Delete the line."
                )
            if key in NOT_IN_A_LOOP.get(stage.name, ()):
                raise ConfigError(
                    f"stages.{stage.name}.{key} cannot be used in a loop", "Delete the line."
                )
            if key == "to_db" and settings.launch:
                raise ConfigError(
                    f"stages.{stage.name}.to_db cannot be used with --launch: what it "
                    "starts leaves the database alone",
                    "Delete the line.",
                )
        stage.settings()
