"""A loop's settings file as the Runs page knows it, and the settings that a lead may change.

A lead's values are numbers, yes or no, or one of a few words: nothing that is text reaches a
command. They are written to OUT/lead.yaml, which `rlhf loop` reads after the file itself.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import InputError
from rlhf.run.rundir import RunDir

Kind = Literal["whole number", "number", "yes or no", "choice"]
MAX_NUMBER = 1e15
# `--kl.source` or, of another command, `rlhf reference --store-top-k`.
_FLAG = re.compile(r"(?:rlhf ([a-z-]+) )?(?<![\w-])--([a-z][a-z0-9.-]*[a-z0-9])")
_STAGE = re.compile(r"(stages\.[a-z-]+): ")


@dataclass(frozen=True, kw_only=True)
class OpenSetting:
    """A setting that the file opens to leads.

    Args:
        name: its path, such as `stages.ppo.steps`.
        kind: of its values.
        value: what the file says, or the default.
        help: what it does.
        choices: the words of a choice.
        may_be_none: it can also be switched off.
    """

    name: str
    kind: Kind
    value: Any
    help: str
    choices: tuple[str, ...] = ()
    may_be_none: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopFile:
    """A loop's settings file.

    Args:
        path: of the file.
        out: folder of the loop.
        open: the settings that leads may change.
        first: the commands of the first round.
        later: the commands of each later one.
        rounds: maximum number of rounds.
        stop_without_gain: stop after a round that does not gain.
    """

    path: Path
    out: Path
    open: tuple[OpenSetting, ...]
    first: tuple[str, ...]
    later: tuple[str, ...]
    rounds: int
    stop_without_gain: bool

    @property
    def run(self) -> RunDir:
        """The files of the loop."""
        return RunDir(self.out)


def read_values(settings: Sequence[OpenSetting], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a lead has sent, by the path of the setting.

    Raises:
        InputError: a setting is not open, or its value is of another kind.
    """
    known = {setting.name: setting for setting in settings}
    for name, value in given.items():
        if name not in known:
            raise InputError(
                f"{name[:100]} is not open to leads", "Reload the page to see which settings are."
            )
        if not _fits(known[name], value):
            expected = {
                "choice": f"one of {', '.join(known[name].choices)}",
                "yes or no": "yes or no",
            }
            raise InputError(
                f"{name} is {str(value)[:40]!r}",
                f"Give {expected.get(known[name].kind, f'a {known[name].kind}')}"
                + (", or leave it empty." if known[name].may_be_none else "."),
            )
    return dict(given)


def _fits(setting: OpenSetting, value: Any) -> bool:
    if value is None:
        return setting.may_be_none
    if setting.kind == "yes or no":
        return isinstance(value, bool)
    if setting.kind == "choice":
        return isinstance(value, str) and value in setting.choices
    kinds = int if setting.kind == "whole number" else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    return is_number and abs(value) < MAX_NUMBER


def names_on_page(text: str, group: str = "") -> str:
    """A text with settings named as on the page in place of flags.

    Args:
        text: a help text or a message.
        group: of its settings, such as `stages.ppo`.

    Example: with `stages.ppo`, `--kl.audit-every` is `stages.ppo.kl.audit_every`.
    """

    def name(flag: "re.Match[str]") -> str:
        of = f"stages.{flag[1]}" if flag[1] else group
        return f"{of}{'.' if of else ''}{flag[2].replace('-', '_')}"

    return _FLAG.sub(name, text)


def settings_on_page(problem: str, remedy: str) -> tuple[str, str]:
    """A command's problem and remedy, with settings named as on the page.

    Example: "stages.ppo: --steps is 0" is "stages.ppo.steps is 0".
    """
    stage = _STAGE.match(problem)
    group = stage[1] if stage else ""
    if stage and problem.startswith("--", stage.end()):
        problem = problem[stage.end() :]
    return names_on_page(problem, group), names_on_page(remedy, group)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by path as a settings file has them: `{"stages.ppo.steps": 3}` in three levels."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        group = root
        for parent in parents:
            group = group.setdefault(parent, {})
        group[last] = value
    return root


def flat(values: Mapping[str, Any], settings: Sequence[OpenSetting]) -> dict[str, Any]:
    """The values of the open settings in nested groups, by path; others are left out."""
    by_path = {}
    for setting in settings:
        group: Any = values
        for part in setting.name.split("."):
            group = group.get(part, LEFT_OUT) if isinstance(group, Mapping) else LEFT_OUT
        if group is not LEFT_OUT and _fits(setting, group):
            by_path[setting.name] = group
    return by_path


LEFT_OUT = object()
