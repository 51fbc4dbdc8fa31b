"""Settings: YAML files composed left to right, range checks, and settings back to YAML.

A settings class may have groups: fields that are dataclasses of settings themselves, `kl` for
example, whose flags are `--kl.source` and so on. A setting is named by its path, `kl.source`.

Settings that were renamed keep their old names, on the command line, in YAML files and in the
config.yaml of older runs. The settings class lists them:

    OLD_NAMES: ClassVar = {"learning_rate": "optim.learning_rate"}  # old path: new path
    OLD_VALUES: ClassVar = {"advantages": {"group": "grpo"}}  # new path: {old value: new value}
    OLD_FILE_VALUES: ClassVar = …  # the same, for values that only files may still have
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_type_hints

import yaml

from rlhf.errors import ConfigError, InputError

Precision = Literal["auto", "bf16", "fp32"]
MAX_SEED = 2**32 - 1  # NumPy's
MAX_YAML_BYTES = 100_000
MAX_YAML_DEPTH = 20
MAX_YAML_VALUES = 10_000
# What a stage did before these settings were there, where their defaults do something else.
EARLIER: dict[str, dict[str, Any]] = {
    "reward": {
        "data.reads_thinking": True,
        "objective.all_bad_weight": 0.0,
        "objective.thumbs_weight": 0.0,
    },
    "ppo": {"sampling.correction": "none"},
}

S = TypeVar("S")


def load_settings(files: Sequence[Path], settings: type[Any] | None = None) -> dict[str, Any]:
    """Merge YAML files left to right; a later file wins key by key, nested groups included.

    Args:
        files: the files.
        settings: the settings class; old names and values in the files become today's.

    Raises:
        ConfigError: a file is missing, is not YAML, or is not a mapping.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge(merged, with_new_names(_load(file), settings))
    return merged


def setting_names(settings: Any, prefix: str = "") -> Iterator[str]:
    """The path of every setting of a settings class, those in groups with a dot."""
    types = get_type_hints(settings)
    for one in fields(settings):
        name, kind = f"{prefix}{one.name}", types[one.name]
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


def with_new_names(content: dict[str, Any], settings: type[Any] | None) -> dict[str, Any]:
    """The content of a settings file with today's names and values in place of old ones.

    Where a file has a setting by both names, the new one counts.
    """
    found = _copy(content)
    for old, new in old_names(settings).items():
        group, name = _find(found, old.split("."))
        if name is None or isinstance(group[name], dict):  # a group may have a setting's old name
            continue
        value = group.pop(name)
        *parents, last = new.split(".")
        target: Any = found
        for parent in parents:
            target = target.setdefault(parent, {}) if isinstance(target, dict) else None
        if isinstance(target, dict):  # else it is refused as no group of settings
            target.setdefault(last, value)
    values = {**getattr(settings, "OLD_VALUES", {}), **getattr(settings, "OLD_FILE_VALUES", {})}
    for path, renamed in values.items():
        group, name = _find(found, path.split("."))
        if name is not None and isinstance(group[name], str):
            group[name] = renamed.get(group[name], group[name])
    return found


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    """A copy whose nested groups are copies, too."""
    return {k: _copy(v) if isinstance(v, dict) else v for k, v in values.items()}


def _find(values: dict[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], str | None]:
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


def with_new_flags(words: Sequence[str], settings: type[Any] | None) -> list[str]:
    """A command line with today's flags and values in place of old ones."""
    flags = {flag_of(old): flag_of(new) for old, new in old_names(settings).items()}
    negated = {_negated(old): _negated(new) for old, new in flags.items()}
    values = {flag_of(n): v for n, v in getattr(settings, "OLD_VALUES", {}).items()}
    found: list[str] = []
    expected: Mapping[str, str] = {}  # old values of the flag that came last
    for word in words:
        if not word.startswith("--"):
            found.append(expected.get(word, word))
            expected = {}
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        flag = (flags | negated).get(flag, flag if equals else word)
        expected = values.get(flag, {})
        found.append(f"{flag}={expected.get(value, value)}" if equals else flag)
    return found


def _negated(flag: str) -> str:
    """The flag that switches `flag` off: `--no-resume`, in a group `--kl.no-resume`."""
    group, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{group}{dot}no-{name}"


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
    found: S = replace(settings, **own)  # type: ignore[type-var]  # a dataclass
    return found


def _load(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"No such settings file: {file}", "Check the path after --config.")
    return read_settings_file(file)


def read_settings_file(file: Path) -> dict[str, Any]:
    """The settings in one YAML file.

    Raises:
        ConfigError: the file is no text, is not YAML, is not a mapping, or stands for much more
            than it says.
    """
    try:
        if file.stat().st_size > MAX_YAML_BYTES:
            raise ValueError(f"more than {MAX_YAML_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8")
        loader = _BoundedLoader(text)
        root = loader.get_single_node()
        _require_small(root)
        value = None if root is None else _plain(loader.construct_document(root))
        str(value)  # Python refuses to write numbers of thousands of digits
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start})",
            f"Convert it first: iconv -f LATIN1 -t UTF-8 {file} > converted.yaml",
        ) from None
    except (yaml.YAMLError, ValueError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not valid YAML: {' '.join(str(error).split())}",
            "Fix the file; one `name: value` a line.",
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file} holds a {type(value).__name__}, not settings",
            "Write one `name: value` a line, as `rlhf COMMAND --dry-run` prints them.",
        )
    return value


def _plain(value: Any) -> Any:
    """YAML as settings hold it: a date is the text that stands for it.

    Raises:
        TypeError: bytes, sets and the like.
    """
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, date):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__} is no setting")


class _BoundedLoader(yaml.SafeLoader):
    """Stops reading where there is more than settings can be: PyYAML's time grows with depth."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._count += 1
        _require_bounds(self._depth, self._count)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _require_bounds(depth: int, count: int) -> None:
    if depth > MAX_YAML_DEPTH or count > MAX_YAML_VALUES:
        raise ValueError(
            f"more than {MAX_YAML_DEPTH} levels or {MAX_YAML_VALUES:,} values, with what *names "
            "repeat"
        )


def _require_small(root: yaml.Node | None) -> None:
    """Refuse YAML that repeats itself by `&name` and `*name` without an end, or nearly so.

    Raises:
        ValueError: it is too deep or too long when written out.
    """
    left, count = [(root, 0)], 0
    while left:
        node, depth = left.pop()
        count += 1
        _require_bounds(depth, count)
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        for part in parts:
            both = part if isinstance(part, tuple) else (part,)
            left += [(one, depth + 1) for one in both]


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Both mappings in one; where both have a key, `over` wins, key by key in nested mappings."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def to_plain(settings: Any) -> Any:
    """Settings as plain YAML and JSON values: paths become text, tuples become lists."""
    if is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: to_plain(getattr(settings, f.name)) for f in fields(settings)}
    if isinstance(settings, Path):
        return str(settings)
    if isinstance(settings, tuple | list):
        return [to_plain(item) for item in settings]
    return settings


def earlier_behavior(stage: str, recorded: dict[str, Any]) -> dict[str, Any]:
    """What a run did before settings were there, where defaults now do something else.

    Args:
        stage: of the run.
        recorded: the plain values of its settings, by today's names.
    """
    if stage == "ppo" and _recorded(recorded, "sampling.engine", "generate") == "generate":
        return {}  # its sampler is the trainer: there is nothing to correct for
    return EARLIER.get(stage, {})


def require_same_settings(
    out: Path,
    settings: Any,
    recorded: dict[str, Any],
    earlier: dict[str, Any],
    free: Collection[str],
) -> None:
    """Refuse to go on with a run under other settings than it was started with.

    Args:
        out: the folder of the run.
        settings: a dataclass of today's settings.
        recorded: the plain values of the run's.
        earlier: what the run did where a setting was not there yet; else it is today's default.
        free: settings that may change.

    Raises:
        InputError: others differ; the message names them.
    """
    names = list(setting_names(type(settings)))
    usual = {**_defaults(settings), **earlier}
    old = {name: _recorded(recorded, name, usual.get(name)) for name in names}
    new = {name: to_plain(read_setting(settings, name)) for name in names}
    changed = sorted(
        name
        for name in names
        if name not in free and name.partition(".")[0] not in free and old[name] != new[name]
    )
    if not changed:
        return
    described = ", ".join(f"{name}: {old[name]} → {new[name]}" for name in changed)
    absent = object()
    flags = " ".join(
        _flag(name, earlier[name])
        for name in changed
        if name in earlier and _recorded(recorded, name, absent) is absent
    )
    same = f"the same settings (add {flags})" if flags else "the same settings"
    raise InputError(
        f"{out} was started with other settings ({described})",
        f"Resume with {same}, or choose another --out.",
    )


def _recorded(values: dict[str, Any], name: str, default: Any) -> Any:
    """The value at the path `name` in nested mappings."""
    group, key = _find(values, name.split("."))
    return default if key is None else group[key]


def _defaults(settings: Any) -> dict[str, Any]:
    """The plain values of those settings that have a default, by path."""
    usual = SimpleNamespace()
    for one in fields(settings):
        if one.default is not MISSING:
            setattr(usual, one.name, one.default)
        elif one.default_factory is not MISSING:
            setattr(usual, one.name, one.default_factory())
    names = setting_names(type(settings))
    return {
        name: to_plain(read_setting(usual, name))
        for name in names
        if hasattr(usual, name.partition(".")[0])
    }


def _flag(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def without_secrets(settings: Any) -> Any:
    """Settings as files and trackers may hold them: an address of --notify is a key to a chat."""
    return replace(settings, notify="") if getattr(settings, "notify", "") else settings


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as dotted names: {"kl": {"nats": 1}} becomes {"kl.nats": 1}."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        nested = isinstance(item, dict)
        flat |= flatten(item, f"{prefix}{key}.") if nested else {f"{prefix}{key}": item}
    return flat


def to_yaml(settings: Any) -> str:
    """Settings as the text of a YAML file that `--config` reads back."""
    return yaml.safe_dump(to_plain(settings), sort_keys=False, allow_unicode=True)


def require_range(
    name: str,
    value: float,
    low: float,
    high: float = float("inf"),
    *,
    above_low: bool = False,
) -> None:
    """Refuse a number outside [low, high], or outside (low, high] with `above_low`.

    Raises:
        ConfigError: out of range; the message names the setting, the value and the range.
    """
    if low <= value <= high and not (above_low and value == low):
        return
    lower = f"more than {_digits(low)}" if above_low else f"at least {_digits(low)}"
    upper = "" if high == float("inf") else f" and at most {_digits(high)}"
    raise ConfigError(f"{flag_of(name)} is {_digits(value)}", f"Give a value of {lower}{upper}.")


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def read_text(path: Path | None, flag: str) -> str:
    """The text of a file that `flag` names; empty where it names none.

    Raises:
        InputError: the file cannot be read as text.
    """
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(
            f"{flag} {path} cannot be read: {reason}", f"Give {flag} a text file."
        ) from None


def part_of(name: str, part: str, whole: int) -> int:
    """How many of `whole` a setting such as `500` or `1%` means: at least 1, at most all.

    Raises:
        ConfigError: it is neither a count nor a percentage up to 100 %.
    """
    percent = part.endswith("%")
    try:
        value = float(part[:-1]) if percent else int(part)
    except ValueError:
        value = 0
    if not 0 < value <= (100 if percent else math.inf):
        raise ConfigError(
            f"{flag_of(name)} is {part!r}",
            "Give a number such as 500, or a percentage such as 1%.",
        )
    wanted = math.ceil(whole * value / 100) if percent else int(value)
    return min(wanted, whole)
