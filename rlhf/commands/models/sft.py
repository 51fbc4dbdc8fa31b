"""`rlhf sft`."""

from typing import Any

from policies.sft.settings import SFTSettings as Settings

__all__ = ["Settings", "memory_plan", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Fine-tune a model on demonstrations, those written in the labelling app or others."""
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
