"""How much memory storing the reference outputs needs in each process; as in `planner`."""

from rlhf.planning.planner import (
    FP32,
    SCORE_BATCH,
    Item,
    Plan,
    Shape,
    copies,
    frozen_item,
    sampling_items,
    scored_logits_bytes,
    working_bytes,
)


def reference_plan(
    shape: Shape,
    reward: Shape | None,
    *,
    batch: int,
    prompt: int,
    new: int,
    bf16: bool,
    parts: int = 1,
    divided: bool = False,
    offload: bool = False,
) -> Plan:
    """Storing reference outputs: one frozen model samples and scores, a reward model may judge.

    Args:
        shape: the model that answers.
        reward: the one that judges, if any.
        batch: sequences sampled at once, and, up to SCORE_BATCH, scored.
        prompt: tokens of the longest prompts.
        new: tokens of the longest responses.
        bf16: autocast.
        parts: processes that hold one model together, or divide it.
        divided: they divide it; each gathers all of it to sample, and a layer at a time to score.
        offload: what they divide is in main memory.
    """
    share = 0.0 if offload else 1 / parts
    resident = [frozen_item("reference model", shape.parameters * share)]
    if reward is not None:
        resident.append(frozen_item("reward model", reward.reward_parameters * share))
    together = 1 if divided else parts
    gathered = [Item("whole weights", FP32 * shape.parameters, "gathered to sample")] * divided
    scored = min(batch, SCORE_BATCH)
    layer = working_bytes(shape, scored * (prompt + new), prompt + new, bf16=bf16)
    logits = scored_logits_bytes(shape, scored * new, bf16=bf16)
    scoring = (
        *copies(0.0 if divided else shape.linear / parts, bf16=bf16),
        Item("one layer", layer, f"{scored} × {prompt + new} tokens"),
        Item("logits", logits, f"{scored} × {new} positions"),
    )
    return Plan(
        f"Memory of each process for the reference outputs, with prompts of {prompt} tokens",
        tuple(resident),
        {
            "sampling": (
                *gathered,
                *sampling_items(
                    shape, batch, prompt, new, bf16=bf16, trained=shape.linear / together
                ),
            ),
            "scoring": scoring,
        },
    )
