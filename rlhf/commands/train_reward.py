"""`rlhf train-reward`."""

from typing import Any

from reward.settings import RewardSettings as Settings

__all__ = ["Settings", "memory_plan", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Train a reward model on rankings and measure it on held-out ones."""
    from rlhf.distributed import launch

    launch(settings.processes)
    from reward.train import train_reward

    return train_reward(settings)


def memory_plan(settings: Settings) -> str:
    """What the run will hold in memory; no weights are loaded."""
    from rlhf.distributed import choose_precision
    from rlhf.planner import read_shape, reward_plan

    plan = reward_plan(
        read_shape(settings.model),
        tokens=settings.tokens_per_batch,
        length=settings.max_length,
        bf16=choose_precision(settings.precision) == "bf16",
        checkpointing=settings.gradient_checkpointing,
        processes=settings.processes,
    )
    return plan.text
