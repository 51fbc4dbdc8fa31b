"""`lead_may`: the settings that a loop's file opens to leads, as the Runs page needs them."""

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import CycloptsError

from labeling_app.web.runs.loop_file import Kind, LoopFile, OpenSetting, names_on_page
from rlhf.commands.files import refuse_unknown, settings_from_values
from rlhf.commands.loop.settings import SECTIONS, LoopSettings
from rlhf.commands.loop.stages import Stage, require_valid, set_by_loop, stages_of_round
from rlhf.commands.parse_errors import explain
from rlhf.config import default_values, load_settings
from rlhf.config.paths import find_setting, setting_names
from rlhf.errors import ConfigError, did_you_mean

KINDS: dict[Any, Kind] = {int: "whole number", float: "number", bool: "yes or no"}


def read_loop_file(path: Path) -> tuple[LoopSettings, LoopFile]:
    """The settings of a loop's file, and what the Runs page needs of it.

    Raises:
        ConfigError: the file is missing, or something in it is wrong.
    """
    values = load_settings([path], LoopSettings)
    refuse_unknown(values, LoopSettings, str(path))
    try:
        settings = settings_from_values(values, LoopSettings, str(path))
    except CycloptsError as error:
        raise explain(error, ["loop"], [], LoopSettings) from None
    require_valid(settings)
    file = LoopFile(
        path=path,
        out=settings.out,
        open=open_settings(settings),
        first=_names(settings, 0),
        later=_names(settings, 1),
        rounds=settings.rounds,
        stop_without_gain=settings.stop_without_gain,
    )
    return settings, file


def _names(settings: LoopSettings, number: int) -> tuple[str, ...]:
    return tuple(stage.name for stage in stages_of_round(settings, number))


def open_settings(settings: LoopSettings) -> tuple[OpenSetting, ...]:
    """The settings that `lead_may` names.

    Raises:
        ConfigError: one of them does not exist, has no effect, or takes text.
    """
    both = (*stages_of_round(settings, 0), *stages_of_round(settings, 1))
    stages = {stage.name: stage for stage in both}
    return tuple(_open(settings, name, stages) for name in settings.lead_may)


def _open(settings: LoopSettings, name: str, stages: dict[str, Stage]) -> OpenSetting:
    top, _, rest = name.partition(".")
    section, _, path = rest.partition(".")
    if top != "stages":
        known = [setting for setting in setting_names(LoopSettings) if setting != "stages"]
        _require_known(name, known, "")
        return _described(name, LoopSettings, name, getattr(settings, name))
    _require_known(section, list(stages), "stages.")
    kind, stage = SECTIONS[section], stages[section]
    _require_known(path, list(setting_names(kind)), f"stages.{section}.")
    if path in set_by_loop(settings, stage):
        raise ConfigError(
            f"lead_may opens {name}, and rlhf loop sets it itself", "Delete it from lead_may."
        )
    group, key = find_setting({**stage.given, **stage.section}, path.split("."))
    value = default_values(kind).get(path) if key is None else group[key]
    return _described(name, kind, path, value)


def _require_known(name: str, known: list[str], prefix: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known, prefix)
        raise ConfigError(
            f"lead_may opens {prefix}{name}, and there is no such setting",
            f"{hint}There are: {', '.join(known)}.",
        )


def _described(name: str, kind: type[Any], path: str, value: Any) -> OpenSetting:
    *groups, last = path.split(".")
    for group in groups:
        kind = get_type_hints(kind)[group]
    hint = get_type_hints(kind)[last]
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    [option, *more] = [option for option in options if option is not NoneType]
    choices = get_args(option) if get_origin(option) is Literal else ()
    if more or not (option in KINDS or choices):
        raise ConfigError(
            f"lead_may opens {name}, whose values are text or lists",
            "Open numbers, yes or no, and choices only: text could name files or programs.",
        )
    return OpenSetting(
        name=name,
        kind="choice" if choices else KINDS[option],
        value=value,
        help=names_on_page(_help(kind, last), name.removesuffix(path).rstrip(".")),
        choices=tuple(map(str, choices)),
        may_be_none=NoneType in options,
    )


def _help(kind: type[Any], name: str) -> str:
    """The text under a field of a settings class."""
    for owner in kind.__mro__:
        if not (is_dataclass(owner) and name in owner.__annotations__):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            is_it = isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == name
            if is_it and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return inspect.cleandoc(str(below.value.value)).replace("\n", " ")
    return ""
