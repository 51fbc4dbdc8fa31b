"""Settings of PPO by the short names of their flags: `micro_tokens` is `batch.micro_tokens`."""

from typing import Any

from policies.ppo import settings as ppo
from rlhf.config.paths import with_changes

REQUIRED = ("model", "reward", "reference", "out")


def ppo_settings(**given: Any) -> ppo.PPOSettings:
    """Settings with these values; the required ones must be among them."""
    made = ppo.PPOSettings(**{name: given.pop(name) for name in REQUIRED})
    return changed(made, **given)


def changed(settings: ppo.PPOSettings, **changes: Any) -> ppo.PPOSettings:
    """The settings with other values."""
    names = ppo.PPOSettings.OLD_NAMES
    return with_changes(settings, {names.get(name, name): one for name, one in changes.items()})
