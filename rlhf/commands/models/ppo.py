"""`rlhf ppo`."""

from pathlib import Path
from typing import Any

from policies.ppo.settings import PPOSettings as Settings
from rlhf.commands.wording import advice_on_speed, described_kl, next_command

EXAMPLE = """rlhf ppo --model models/SmolLM2-135M-Instruct --reward runs/first/reward \\
    --reference runs/first/reference --out runs/first/ppo"""


def run(settings: Settings) -> dict[str, Any]:
    """Train a policy with PPO against a reward model."""
    from policies.ppo.train import train_policy
    from rlhf.parallel.distributed import launch

    launch(settings.processes, settings.parallel.max_restarts)
    return train_policy(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How far the reward and the policy moved, and how to find out whether it is better."""
    reward, out = result["reward"], settings.out.parent / "evaluate"
    judges: dict[str, str | Path] = {"reward": settings.reward[0], "reference": settings.reference}
    return "\n".join(
        [
            f"Mean reward on training prompts: {reward['first']:z.2f} in the first of "
            f"{result['steps']} steps, {reward['last']:z.2f} in the last, each of "
            f"{settings.batch.episodes_per_step} responses.",
            f"Reverse KL from the original model: {described_kl(result['kl']['reverse'])}.",
            *advice_on_speed(result),
            next_command("evaluate", policy=settings.out, **judges, out=out),
        ]
    )


def memory_plan(settings: Settings) -> str:
    """The memory of each process; lengths are those of the reference outputs, if these exist."""
    from policies.ppo.memory import plan_memory

    return plan_memory(settings)
