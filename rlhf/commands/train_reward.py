"""`rlhf train-reward`: train a reward model on rankings and say how good it is."""

from typing import Any

from reward.settings import RewardSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Train a reward model on rankings and measure it on held-out ones."""
    from rlhf.distributed import launch

    launch(settings.processes)
    from reward.train import train_reward

    return train_reward(settings)
