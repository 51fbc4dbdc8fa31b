"""`rlhf ppo`."""

from typing import Any

from policies.settings import PPOSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Train a policy with PPO against a reward model."""
    from policies.train import train_policy
    from rlhf.distributed import launch

    launch(settings.processes)
    return train_policy(settings)
