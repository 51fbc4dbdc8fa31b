"""`rlhf sft`."""

from typing import Any

from policies.sft.settings import SFTSettings as Settings
from rlhf.commands.wording import advice_on_speed, next_command
from rlhf.records.wording import counted

EXAMPLE = """rlhf sft --demonstrations demonstrations \\
    --model models/SmolLM2-135M-Instruct --out runs/first/sft"""


def run(settings: Settings) -> dict[str, Any]:
    """Fine-tune a model on demonstrations, or on the best reference output of each prompt."""
    from rlhf.parallel.distributed import launch

    launch(settings.processes)
    from policies.sft.train import fine_tune

    return fine_tune(settings)


def memory_plan(settings: Settings) -> str:
    """The memory plan of the run; no weights are loaded."""
    import torch

    from rlhf.parallel.distributed import choose_precision
    from rlhf.planning.plan import Pass
    from rlhf.planning.planner import read_shape
    from rlhf.planning.training_plan import sft_plan

    length = settings.max_length
    return sft_plan(
        read_shape(settings.model),
        Pass(settings.micro_batch_size * length, length, settings.gradient_checkpointing),
        bf16=choose_precision(settings.precision) == "bf16",
        processes=settings.processes,
        on_cpu=not torch.cuda.is_available(),
    ).text


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many demonstrations were learned, and what that did to the held-out loss."""
    before, after = (result["held_out_loss"][when] for when in ("before", "after"))
    loss = "" if before is None else f"; the held-out loss went from {before:.3f} to {after:.3f}"
    steps = counted(result["steps"], "step")
    if "best_of" not in result:
        learned = counted(result["demonstrations"]["train"], "demonstration")
        following = next_command("chat", policy=settings.out, reference=settings.model)
        lines = [f"Trained {steps} on {learned}{loss}.", *advice_on_speed(result), following]
        return "\n".join(lines)
    best, inputs = result["best_of"], result["inputs"]
    following = next_command(
        "evaluate",
        policy=settings.out,
        reference=inputs["reference"]["path"],
        reward=inputs["reward"]["path"],
        out=settings.out.parent / "evaluate-sft",
    )
    return "\n".join(
        [
            f"Trained {steps} on the best of {best['samples']} outputs of "
            f"{counted(best['chosen'], 'prompt')}{loss}.",
            f"The mean reward of these outputs is {best['reward']['chosen']:z.2f}, of all outputs "
            f"of the same prompts {best['reward']['all']:z.2f}.",
            *_remarks(best),
            *advice_on_speed(result),
            following,
        ]
    )


def _remarks(best: dict[str, Any]) -> list[str]:
    """Remarks on the choice of outputs, a sentence each."""
    reasons = {
        "no_choice": "left out: all outputs have the same text or the same reward",
        "tied": "with several best outputs: the first of them was taken",
        "unfinished": "with a best output that was cut at the length limit: the model learns to "
        "stop there",
    }
    return [
        f"{counted(best[name], 'prompt')} {why}." for name, why in reasons.items() if best[name]
    ]
