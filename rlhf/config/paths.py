"""Names of settings: their paths in groups, their flags, and the names that they had before.

A settings class may have groups: fields that are dataclasses of settings themselves, `kl` for
example, whose flags are `--kl.source` and so on. A setting is named by its path, `kl.source`.

Settings that were renamed keep their old names, on the command line, in YAML files and in the
config.yaml of older runs. The settings class lists them:

    OLD_NAMES: ClassVar = {"learning_rate": "optim.learning_rate"}  # old path: new path
    OLD_VALUES: ClassVar = {"advantages": {"group": "grpo"}}  # new path: {old value: new value}
    OLD_FILE_VALUES: ClassVar = …  # the same, for values that only files may still have
    ZERO_IS_NONE: ClassVar = {"kl.audit_every"}  # paths where 0 used to mean None

A setting may also be a mapping of sections, each with settings of another class:

    SECTIONS: ClassVar = {"stages": {"ppo": PPOSettings}}  # setting: {section: its class}
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

S = TypeVar("S")


def setting_names(settings: Any, prefix: str = "") -> Iterator[str]:
    """The path of every setting of a settings class, those in groups with a dot."""
    types = get_type_hints(settings)
    for field in fields(settings):
        name, kind = f"{prefix}{field.name}", types[field.name]
        if is_dataclass(kind):
            yield from setting_names(kind, f"{name}.")
        else:
            yield name


def flag_of(name: str) -> str:
    """`kl.audit_every` as it is typed: `--kl.audit-every`."""
    return "--" + name.replace("_", "-")


def old_names(settings: type[Any] | None) -> Mapping[str, str]:
    """Old paths of settings and the paths that they have today."""
    return getattr(settings, "OLD_NAMES", {})


def sections_of(settings: type[Any] | None) -> Mapping[str, dict[str, type[Any]]]:
    """The settings that are mappings of sections, and the class of each section."""
    return getattr(settings, "SECTIONS", {})


def with_new_names(content: dict[str, Any], settings: type[Any] | None) -> dict[str, Any]:
    """The content of a settings file with today's names and values in place of old ones.

    Where a file has a setting by both names, the new one counts.
    """
    new_content = deepcopy(content)
    for old, new in old_names(settings).items():
        group, name = find_setting(new_content, old.split("."))
        if name is None or isinstance(group[name], dict):  # a group may have a setting's old name
            continue
        value = group.pop(name)
        *parents, last = new.split(".")
        target: Any = new_content
        for parent in parents:
            target = target.setdefault(parent, {}) if isinstance(target, dict) else None
        if isinstance(target, dict):  # else it is refused as no group of settings
            target.setdefault(last, value)
    values = {**getattr(settings, "OLD_VALUES", {}), **getattr(settings, "OLD_FILE_VALUES", {})}
    for path, renamed in values.items():
        group, name = find_setting(new_content, path.split("."))
        if name is not None and isinstance(group[name], str):
            group[name] = renamed.get(group[name], group[name])
    for path in _zero_is_none(settings):
        group, name = find_setting(new_content, path.split("."))
        if name is not None and group[name] == 0 and not isinstance(group[name], bool):
            group[name] = None
    return new_content | {
        name: _sections(new_content[name] or {}, kinds)
        for name, kinds in sections_of(settings).items()
        if name in new_content and isinstance(new_content[name], dict | None)
    }


def _sections(sections: dict[Any, Any], kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Sections by the names of their commands; an empty one has no settings."""
    named = {str(name).replace("_", "-"): value for name, value in sections.items()}
    return {
        name: with_new_names(value or {}, kinds.get(name))
        if isinstance(value, dict | None)
        else value
        for name, value in named.items()
    }


def _zero_is_none(settings: type[Any] | None) -> Collection[str]:
    """Paths of settings where 0 used to mean None."""
    return getattr(settings, "ZERO_IS_NONE", ())


def find_setting(values: dict[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """The mapping that holds the setting at `path`, and its key there; None where there is none.

    A key may be written with hyphens.
    """
    *parents, last = path
    for parent in parents:
        inner = values.get(parent, values.get(parent.replace("_", "-")))
        if not isinstance(inner, dict):
            return values, None
        values = inner
    return values, next((key for key in (last, last.replace("_", "-")) if key in values), None)


def with_new_flags(tokens: Sequence[str], settings: type[Any] | None) -> list[str]:
    """A command line with today's flags and values in place of old ones."""
    flags = {flag_of(old): flag_of(new) for old, new in old_names(settings).items()}
    negated = {
        _prefixed(old, word): _prefixed(new, word)
        for old, new in flags.items()
        for word in ("no", "empty")
    }
    values = {flag_of(n): v for n, v in getattr(settings, "OLD_VALUES", {}).items()}
    values |= {flag_of(name): {"0": "none", "0.0": "none"} for name in _zero_is_none(settings)}
    new_tokens: list[str] = []
    expected: Mapping[str, str] = {}  # old values of the flag that came last
    for token in tokens:
        if not token.startswith("--"):
            new_tokens.append(expected.get(token, token))
            expected = {}
            continue
        flag, equals, value = token.partition("=")
        flag = flag.replace("_", "-")
        flag = (flags | negated).get(flag, flag if equals else token)
        expected = values.get(flag, {})
        new_tokens.append(f"{flag}={expected.get(value, value)}" if equals else flag)
    return new_tokens


def _prefixed(flag: str, word: str) -> str:
    """The flag that switches `flag` off, with `no` or `empty`: `--no-resume`, `--kl.no-resume`."""
    group, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{group}{dot}{word}-{name}"


def read_setting(settings: Any, name: str) -> Any:
    """The value of the setting at the path `name`."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def with_changes(settings: S, changes: Mapping[str, Any]) -> S:
    """Settings with other values, by path: `{"kl.coefficient": 0.2}`."""
    own = {path: value for path, value in changes.items() if "." not in path}
    for group in {path.partition(".")[0] for path in changes} - own.keys():
        inner = {
            path.partition(".")[2]: value
            for path, value in changes.items()
            if path.startswith(f"{group}.")
        }
        own[group] = with_changes(getattr(settings, group), inner)
    changed: S = replace(settings, **own)  # type: ignore[type-var]  # a dataclass
    return changed
