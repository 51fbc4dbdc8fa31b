"""Refuses settings that have no effect in the chosen mode of a command."""

from collections.abc import Collection
from typing import Any

from rlhf.config import default_values, flag_of, read_setting, setting_names, to_plain
from rlhf.errors import ConfigError


def refuse_idle(settings: Any, names: Collection[str], mode: str) -> None:
    """Refuse settings that were changed although they have no effect in the chosen mode.

    `names` are settings, or groups of them; `mode` ends the sentence "--role has no effect …".

    Raises:
        ConfigError: names the settings that are not at their defaults.
    """
    usual = default_values(type(settings))
    changed = [
        flag_of(name)
        for name in setting_names(type(settings))
        if {name, name.partition(".")[0]} & set(names)
        and to_plain(read_setting(settings, name)) != usual.get(name)
    ]
    if changed:
        have = "has" if len(changed) == 1 else "have"
        raise ConfigError(f"{' and '.join(changed)} {have} no effect {mode}", "Leave it out.")
