"""`rlhf train-reward`."""

from typing import Any

from reward.settings import RewardSettings as Settings

EXAMPLE = """rlhf train-reward --rankings rankings --model models/SmolLM2-135M-Instruct \\
    --out runs/first/reward"""


def run(settings: Settings) -> dict[str, Any]:
    """Train a reward model on rankings and measure it on held-out prompts."""
    from rlhf.parallel.distributed import launch

    launch(settings.processes, settings.parallel.max_restarts)
    if settings.seeds:
        from reward.training.ensemble import train_ensemble

        return train_ensemble(settings)
    if settings.learning_curve:
        from reward.training.learning_curve import train_learning_curve

        return train_learning_curve(settings)
    from reward.training.train import train_reward

    return train_reward(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How far to trust the model, from its report.json."""
    from reward.report.summaries import describe_training
    from rlhf.run.rundir import RunDir

    run = RunDir(settings.out)
    with run.reading_report():
        return describe_training(settings, run.read_report())


def memory_plan(settings: Settings) -> str:
    """What the run will hold in memory; no weights are loaded."""
    from reward.memory import plan_sharded
    from reward.training.origin import resolve_model

    return plan_sharded(resolve_model(settings)).text
