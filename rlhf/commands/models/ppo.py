"""`rlhf ppo`."""

from typing import Any

from policies.ppo.settings import PPOSettings as Settings

EXAMPLE = """rlhf ppo --model models/SmolLM2-135M-Instruct --reward runs/first/reward \\
    --reference runs/first/reference --out runs/first/ppo"""


def run(settings: Settings) -> dict[str, Any]:
    """Train a policy with PPO against a reward model."""
    from policies.ppo.train import train_policy
    from rlhf.parallel.distributed import launch

    launch(settings.processes, settings.parallel.max_restarts)
    return train_policy(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How far reward and policy moved."""
    from policies.evaluate.summaries import describe_policy

    return describe_policy(settings, result)


def memory_plan(settings: Settings) -> str:
    """The memory of each process; lengths are those of the reference outputs, if these exist."""
    from policies.ppo.memory import plan_memory

    return plan_memory(settings)
