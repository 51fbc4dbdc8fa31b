"""`rlhf distill`."""

from typing import Any

from policies.deployment.distill.settings import DistillSettings as Settings
from rlhf.commands.wording import counted, next_command

EXAMPLE = """rlhf distill --teacher runs/first/ppo \\
    --student models/SmolLM2-135M-Instruct --half \\
    --outputs runs/first/taught --out runs/first/distill"""


def run(settings: Settings) -> dict[str, Any]:
    """Train a smaller policy on what a larger one says of the next token (distillation)."""
    from rlhf.parallel.distributed import launch

    launch(settings.processes)
    from policies.deployment.distill.train import distill

    return distill(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """The size of the student, how near it came to the teacher, and how to compare them."""
    parameters, found = result["parameters"], result["divergence"]
    share = 100 * parameters["student"] / parameters["teacher"]
    nearer = (
        ""
        if found["before"] is None
        else f" On held-out outputs its divergence from the teacher went from "
        f"{found['before']:.3f} to {found['after']:.3f} nats per token."
    )
    following = next_command(
        "evaluate",
        policy=settings.out,
        against=settings.teacher,
        reference="REF",
        reward="RM",
        out=settings.out.parent / "evaluate-distill",
    )
    return (
        f"Trained {counted(result['steps'], 'step')} a student of {parameters['student']:,} "
        f"parameters, {share:.0f} % of its teacher's.{nearer}\n{following}"
    )
