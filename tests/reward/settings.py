"""Settings of train-reward by the short names of their flags: `epochs` is `optim.epochs`."""

from typing import Any

from reward.settings import RewardSettings
from rlhf.config.paths import with_changes

REQUIRED = ("rankings", "model", "out")


def reward_settings(**given: Any) -> RewardSettings:
    """Settings with these values; the required ones must be among them."""
    # settings that only go together must arrive together: a group at a time would be refused
    made = {name: given.pop(name) for name in REQUIRED}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        group, _, rest = RewardSettings.OLD_NAMES.get(name, name).partition(".")
        if rest:
            groups.setdefault(group, {})[rest] = value
        else:
            made[group] = value
    usual = RewardSettings.__dataclass_fields__
    return RewardSettings(
        **made,
        **{name: usual[name].default_factory(**values) for name, values in groups.items()},
    )


def changed(settings: RewardSettings, **changes: Any) -> RewardSettings:
    """The settings with other values."""
    names = RewardSettings.OLD_NAMES
    return with_changes(settings, {names.get(name, name): one for name, one in changes.items()})
