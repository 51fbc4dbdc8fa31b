"""Settings: YAML files composed left to right, range checks, and settings back to YAML."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from rlhf.config.paths import find_setting, with_new_names
from rlhf.config.paths import flag_of as flag_of
from rlhf.config.paths import old_names as old_names
from rlhf.config.paths import read_setting as read_setting
from rlhf.config.paths import setting_names as setting_names
from rlhf.config.paths import with_changes as with_changes
from rlhf.errors import ConfigError, InputError

Precision = Literal["auto", "bf16", "fp32"]
TrainingPrecision = Literal["auto", "bf16", "bf16-weights", "fp32"]
MAX_SEED = 2**32 - 1  # NumPy's
MAX_YAML_BYTES = 100_000
MAX_YAML_DEPTH = 20
MAX_YAML_VALUES = 10_000
# How stages behaved before these settings existed, where today's defaults behave differently.
DEFAULTS_BEFORE_SETTING_EXISTED: dict[str, dict[str, Any]] = {
    "reward": {
        "data.reads_thinking": True,
        "objective.all_bad_weight": 0.0,
        "objective.thumbs_weight": 0.0,
    },
    "ppo": {"sampling.correction": "none"},
}


def load_settings(files: Sequence[Path], settings: type[Any] | None = None) -> dict[str, Any]:
    """Merge YAML files left to right; a later file wins key by key, nested groups included.

    Old names and values of the settings class become today's.

    Raises:
        ConfigError: a file is missing, is not YAML, or is not a mapping.
    """
    merged: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(f"No such settings file: {file}", "Check the path after --config.")
        merged = merge(merged, with_new_names(read_settings_file(file), settings))
    return merged


def read_settings_file(file: Path) -> dict[str, Any]:
    """The settings in one YAML file.

    Raises:
        ConfigError: the file is not text, not YAML or not a mapping, or expands to too many values.
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
    """Values of YAML as settings have them: dates become text."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, date):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be a setting")


class _BoundedLoader(yaml.SafeLoader):
    """Refuses YAML with too many levels or values while reading: PyYAML's time grows with depth."""

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
            f"more than {MAX_YAML_DEPTH} levels or {MAX_YAML_VALUES:,} values, with aliases "
            "(*name) expanded"
        )


def _require_small(root: yaml.Node | None) -> None:
    """Refuse YAML whose aliases (`*name`) expand to too many levels or values."""
    left, count = [(root, 0)], 0
    while left:
        node, depth = left.pop()
        count += 1
        _require_bounds(depth, count)
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        for part in parts:
            children = part if isinstance(part, tuple) else (part,)
            left += [(child, depth + 1) for child in children]


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
    """Values of settings that a run predates, where today's defaults behave differently."""
    if stage == "ppo" and _recorded(recorded, "sampling.engine", "generate") == "generate":
        return {}  # the trained model itself samples: nothing to correct
    return DEFAULTS_BEFORE_SETTING_EXISTED.get(stage, {})


def require_same_settings(
    out: Path,
    settings: Any,
    recorded: dict[str, Any],
    earlier: dict[str, Any],
    free: Collection[str],
) -> None:
    """Refuse to resume a run with other settings than it was started with.

    Args:
        out: the folder of the run.
        settings: a dataclass of today's settings.
        recorded: the plain values of the run's.
        earlier: values of settings that the run predates; by default today's defaults.
        free: settings that may change.

    Raises:
        InputError: others differ; the message names them.
    """
    names = list(setting_names(type(settings)))
    usual = {**default_values(type(settings)), **earlier}
    old = {name: _recorded(recorded, name, usual.get(name)) for name in names}
    new = {name: to_plain(read_setting(settings, name)) for name in names}
    changed = sorted(
        name
        for name in names
        if name not in free
        and name.partition(".")[0] not in free
        and not _are_same(old[name], new[name])
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


def _are_same(old: Any, new: Any) -> bool:
    """Whether two values are equal, or paths of one file or folder, however they are written."""
    if old == new:
        return True
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_are_same, old, new))
    if not (isinstance(old, str) and isinstance(new, str) and "/" in f"{old}{new}"):
        return False
    try:
        return Path(old).samefile(new)
    except (OSError, ValueError):  # one of them is not there, or no path
        return False


def _recorded(values: dict[str, Any], name: str, default: Any) -> Any:
    """The value at the path `name` in nested mappings."""
    group, key = find_setting(values, name.split("."))
    return default if key is None else group[key]


def default_values(settings: type[Any]) -> dict[str, Any]:
    """The plain values of those settings of a class that have a default, by path."""
    usual = SimpleNamespace()
    for field in fields(settings):
        if field.default is not MISSING:
            setattr(usual, field.name, field.default)
        elif field.default_factory is not MISSING:
            setattr(usual, field.name, field.default_factory())
    return {
        name: to_plain(read_setting(usual, name))
        for name in setting_names(settings)
        if hasattr(usual, name.partition(".")[0])
    }


def _flag(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def without_secrets(settings: Any) -> Any:
    """Settings without the URL of --notify, with which anyone could post to the chat."""
    return replace(settings, notify=None) if getattr(settings, "notify", "") else settings


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as dotted names: {"kl": {"nats": 1}} becomes {"kl.nats": 1}."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        nested = isinstance(item, dict)
        flat |= flatten(item, f"{prefix}{key}.") if nested else {f"{prefix}{key}": item}
    return flat


def read_object(flag: str, example: str, word: str) -> dict[str, Any]:
    """The JSON object in a word of the command line.

    Raises:
        ConfigError: it is none; names the flag and shows the example.
    """
    try:
        value = json.loads(word)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {word!r}, not a JSON object", f"For example: {example}.")
    return value


def missing_inputs(settings: Any) -> list[str]:
    """The flags of files and folders to read that do not exist, with their paths.

    A label database is not one: some commands create it.
    """
    missing = []
    for name in setting_names(type(settings)):
        value = read_setting(settings, name)
        paths = value if isinstance(value, tuple) else (value,)
        if name not in ("out", "db", "to_db"):
            missing += [
                f"{flag_of(name)} {path}"
                for path in paths
                if isinstance(path, Path) and not path.exists()
            ]
    return missing


def to_yaml(settings: Any) -> str:
    """Settings as the text of a YAML file that `--config` reads back."""
    return yaml.safe_dump(to_plain(settings), sort_keys=False, allow_unicode=True)


def require_range(
    name: str,
    value: float | None,
    low: float,
    high: float = float("inf"),
    *,
    above_low: bool = False,
) -> None:
    """Refuse a number outside [low, high], or outside (low, high] with `above_low`; None passes.

    Raises:
        ConfigError: out of range; the message names the setting, the value and the range.
    """
    if value is None or (low <= value <= high and not (above_low and value == low)):
        return
    lower = f"more than {_digits(low)}" if above_low else f"at least {_digits(low)}"
    upper = "" if high == float("inf") else f" and at most {_digits(high)}"
    raise ConfigError(f"{flag_of(name)} is {_digits(value)}", f"Give a value of {lower}{upper}.")


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def read_text(path: Path | None, flag: str) -> str:
    """The text of the file that `flag` names; empty without one.

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
