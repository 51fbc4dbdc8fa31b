"""Settings from YAML files and from plain values, checked by the class of the settings."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.config import Dict

from rlhf.config import load_settings
from rlhf.config.paths import old_names, sections_of
from rlhf.config.template_kwargs import as_one_token
from rlhf.errors import ConfigError, did_you_mean
from rlhf.run.rundir import STAGE_COMMANDS, RunDir

S = TypeVar("S")


def settings_from_files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in what the --config files say for settings that no flag gave."""
    given = next((a for a in arguments if "--config" in a.names), None)
    if given is None or not given.tokens:
        return
    files = [Path(token.value) for token in given.tokens]
    settings = get_type_hints(app.default_command)["settings"]
    values = load_settings(files, settings)
    source = ", ".join(str(file) for file in files)
    refuse_unknown(values, settings, source)
    values = as_one_token(values, sections_of(settings))
    for name in reversed(commands):  # at the root, settings named like a command would be dropped
        values = {name: values}
    Dict(values, source=source)(app, commands, arguments)


def settings_from_values(values: dict[str, Any], settings: type[S], source: str) -> S:
    """Settings from plain values by name, as a YAML file has them.

    Raises:
        CycloptsError: a value has another type than the setting, or is missing.
        ConfigError: a value is out of range.
    """

    def command(settings: Any) -> None:
        """Take the settings."""

    command.__annotations__["settings"] = Annotated[settings, Parameter(name="*")]
    app = App(config=Dict(as_one_token(values, sections_of(settings)), source=source))
    app.default(command)
    _, bound, _ = app.parse_args([], exit_on_error=False, print_error=False)
    parsed: S = bound.arguments["settings"]
    return parsed


def refuse_unknown(values: dict[str, Any], settings: Any, source: str, prefix: str = "") -> None:
    """Refuse settings of a file that the class does not have.

    Raises:
        ConfigError: names the setting, the file and the closest setting there is.
    """
    known = {field.name: field for field in fields(settings)}
    types = get_type_hints(settings)
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in getattr(settings, "COMMANDS_NOW", {}):
            command = settings.COMMANDS_NOW[name]
            raise ConfigError(
                f"{key} in {source} is now the command rlhf {command}",
                f"Delete the line and type: rlhf {command} --config {source}",
            )
        if name not in known:
            hint = did_you_mean(name, [*known, *old_names(settings)], prefix)
            raise ConfigError(
                f"Unknown setting {prefix}{key} in {source}{_written_by(source)}",
                f"{hint}The settings are: {', '.join(known)}.",
            )
        if name in sections_of(settings):
            _refuse_unknown_sections(value, sections_of(settings)[name], source, f"{key}.")
        elif is_dataclass(types[name]):
            _require_group(value, [f.name for f in fields(types[name])], source, f"{prefix}{key}")
            refuse_unknown(value, types[name], source, f"{prefix}{key}.")


def _written_by(source: str) -> str:
    """Which command wrote a config.yaml, if it stands in the folder of a run."""
    run = RunDir(Path(source).parent)
    command = STAGE_COMMANDS.get(run.read_stage().get("stage", ""))
    is_written = command is not None and Path(source) == run.config_file
    return f", the settings of {command}" if is_written else ""


def _refuse_unknown_sections(
    values: Any, kinds: dict[str, type[Any]], source: str, prefix: str
) -> None:
    _require_group(values, list(kinds), source, prefix.removesuffix("."))
    for name, value in values.items():
        if name not in kinds:
            raise ConfigError(
                f"Unknown section {prefix}{name} in {source}",
                f"{did_you_mean(name, kinds, prefix)}The sections are: {', '.join(kinds)}.",
            )
        names = [field.name for field in fields(kinds[name])]
        _require_group(value, names, source, f"{prefix}{name}")
        refuse_unknown(value, kinds[name], source, f"{prefix}{name}.")


def _require_group(value: Any, names: list[str], source: str, key: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{key} in {source} is {value!r}, not a group of settings",
            f"Its settings are: {', '.join(names)}.",
        )
