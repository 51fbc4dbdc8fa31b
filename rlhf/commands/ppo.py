"""`rlhf ppo`."""

from typing import Any

from policies.settings import PPOSettings as Settings

__all__ = ["Settings", "memory_plan", "run"]

ASSUMED_TOKENS = 256


def run(settings: Settings) -> dict[str, Any]:
    """Train a policy with PPO against a reward model."""
    from policies.train import train_policy
    from rlhf.distributed import launch

    launch(settings.processes, settings.max_restarts)
    return train_policy(settings)


def memory_plan(settings: Settings) -> str:
    """The memory of each process; lengths come from the stored outputs where they are there."""
    from policies.reference_store import open_store
    from policies.reward_sources import is_model
    from rlhf.distributed import choose_precision
    from rlhf.models import model_folder
    from rlhf.planner import ppo_plan, read_shape
    from rlhf.rundir import RunDir

    prompt = new = ASSUMED_TOKENS
    reference = RunDir(settings.reference)
    if reference.is_done:
        store = open_store(reference.outputs)
        prompt = max(len(row.prompt_ids) for row in store.rows)
        new = store.sampling.max_new_tokens
    models = [model_folder(name, "reward", "model") for name in settings.reward if is_model(name)]
    critic = models[0] if models else settings.model
    uses_rows = settings.kl.source == "reference"
    rows = round(settings.micro_batch_size * settings.kl.rows_per_episode) if uses_rows else 0
    return ppo_plan(
        read_shape(settings.model),
        read_shape(critic),
        sample_batch=settings.sample_batch_size,
        episodes=settings.micro_batch_size,
        reference_rows=rows,
        prompt=prompt,
        new=new,
        bf16=choose_precision(settings.precision) == "bf16",
        processes=settings.processes,
        checkpointing=settings.gradient_checkpointing,
    ).text
