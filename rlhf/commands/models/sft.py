"""`rlhf sft`."""

from typing import Any

from policies.sft.settings import SFTSettings as Settings
from rlhf.commands.wording import counted, next_command

__all__ = ["EXAMPLE", "Settings", "describe", "memory_plan", "run"]

EXAMPLE = """rlhf sft --demonstrations demonstrations \\
    --model models/SmolLM2-135M-Instruct --out runs/first/sft"""


def run(settings: Settings) -> dict[str, Any]:
    """Fine-tune a model on demonstrations: answers edited in the labeling app, or others."""
    from rlhf.parallel.distributed import launch

    launch(settings.processes)
    from policies.sft.train import fine_tune

    return fine_tune(settings)


def memory_plan(settings: Settings) -> str:
    """What the run will hold in memory; no weights are loaded."""
    from rlhf.parallel.distributed import choose_precision
    from rlhf.planning.planner import read_shape, sft_plan

    plan = sft_plan(
        read_shape(settings.model),
        sequences=settings.micro_batch_size,
        length=settings.max_length,
        bf16=choose_precision(settings.precision) == "bf16",
        checkpointing=settings.gradient_checkpointing,
        processes=settings.processes,
    )
    return plan.text


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many demonstrations were learned, and what that did to the held-out loss."""
    before, after = (result["held_out_loss"][when] for when in ("before", "after"))
    loss = "" if before is None else f"; the held-out loss went from {before:.3f} to {after:.3f}"
    return (
        f"Trained {counted(result['steps'], 'step')} on "
        f"{counted(result['demonstrations']['train'], 'demonstration')}{loss}.\n"
        f"{next_command('chat', policy=settings.out, reference=settings.model)}"
    )
