"""`rlhf dpo`."""

from typing import Any

from policies.dpo.settings import DPOSettings as Settings
from rlhf.commands.wording import advice_on_speed, next_command
from rlhf.records.wording import counted

EXAMPLE = """rlhf dpo --rankings rankings --model models/SmolLM2-135M-Instruct \\
    --learning-rate 1e-5 --out runs/first/dpo"""


def run(settings: Settings) -> dict[str, Any]:
    """Train a policy on the pairs of rankings, without a reward model (DPO)."""
    from rlhf.parallel.distributed import launch

    launch(settings.processes)
    from policies.dpo.train import optimize_preferences

    return optimize_preferences(settings)


def memory_plan(settings: Settings) -> str:
    """The memory plan of the run; no weights are loaded."""
    import torch

    from rlhf.parallel.distributed import choose_precision
    from rlhf.planning.plan import Pass
    from rlhf.planning.planner import read_shape
    from rlhf.planning.training_plan import dpo_plan

    length = settings.max_length
    tokens = 2 * settings.micro_batch_size * length
    return dpo_plan(
        read_shape(settings.model),
        Pass(tokens, length, settings.gradient_checkpointing),
        bf16=choose_precision(settings.precision) == "bf16",
        processes=settings.processes,
        lora_rank=settings.lora.rank or 0,
        on_cpu=not torch.cuda.is_available(),
    ).text


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many pairs were learned, and how many held-out ones it orders as annotators did."""
    of, held_out = result["pairs"]["train"], result["held_out"]
    right = (
        f" It orders {100 * held_out['accuracy']:.0f} % of "
        f"{counted(result['pairs']['test']['pairs'], 'held-out pair')} as the annotators did."
        if held_out
        else ""
    )
    following = next_command(
        "evaluate",
        policy=settings.out,
        reference="REF",
        reward="RM",
        out=settings.out.parent / "evaluate-dpo",
    )
    learned = (
        f"Trained {counted(result['steps'], 'step')} on {counted(of['pairs'], 'pair')} of "
        f"{counted(of['prompts'], 'prompt')}.{right}"
    )
    return "\n".join([learned, *advice_on_speed(result), following])
