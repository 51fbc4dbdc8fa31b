"""Refuses settings that have no effect in the chosen mode of a command."""

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from rlhf.errors import ConfigError


def refuse_idle(settings: Any, names: Collection[str], mode: str) -> None:
    """Refuse settings that were changed although they have no effect in the chosen mode.

    `mode` ends the sentence "--role has no effect …".

    Raises:
        ConfigError: names the settings that are not at their defaults.
    """
    changed = [
        f"--{one.name.replace('_', '-')}"
        for one in fields(settings)
        if one.name in names and getattr(settings, one.name) != _default(one)
    ]
    if changed:
        have = "has" if len(changed) == 1 else "have"
        raise ConfigError(f"{' and '.join(changed)} {have} no effect {mode}", "Leave it out.")


def _default(setting: Any) -> Any:
    made = setting.default_factory is not MISSING
    return setting.default_factory() if made else setting.default
