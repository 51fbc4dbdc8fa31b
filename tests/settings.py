"""Settings of trainings by the short names of their flags: `epochs` is `optim.epochs`."""

from typing import Any, TypeVar

from policies.ppo.settings import PPOSettings
from reward.settings import RewardSettings
from rlhf.config.paths import old_names, with_changes
from rlhf.parallel.settings import GroupSettings

S = TypeVar("S", bound=GroupSettings)


def reward_settings(*, rankings: Any, model: str, out: Any, **given: Any) -> RewardSettings:
    """Settings of train-reward with these values."""
    return changed(RewardSettings(rankings=rankings, model=model, out=out), **given)


def ppo_settings(*, model: str, reward: Any, reference: Any, out: Any, **given: Any) -> PPOSettings:
    """Settings of PPO with these values."""
    made = PPOSettings(model=model, reward=reward, reference=reference, out=out)
    return changed(made, **given)


def changed(settings: S, **changes: Any) -> S:
    """The settings with other values."""
    names = old_names(type(settings))
    return with_changes(settings, {names.get(name, name): one for name, one in changes.items()})
