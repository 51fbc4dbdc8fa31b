"""How much memory `rlhf reference` needs in each process; as in `planner`."""

from dataclasses import replace

from rlhf.modeling.log_probs import SCORE_BATCH
from rlhf.planning.plan import Item, Plan, SampleBatch
from rlhf.planning.planner import (
    FP32,
    Shape,
    block_bytes,
    copies,
    frozen_item,
    part_of_vocabulary,
    sampling_items,
    working_bytes,
)


def reference_plan(
    shape: Shape,
    reward: Shape | None,
    batch: SampleBatch,
    *,
    bf16: bool,
    parts: int = 1,
    is_sharded: bool = False,
    offload: bool = False,
) -> Plan:
    """Reference outputs: one frozen model samples and scores; a reward model is optional.

    Args:
        shape: the model that answers.
        reward: the reward model, if any.
        batch: sequences sampled at once, and, up to SCORE_BATCH, scored.
        bf16: autocast.
        parts: processes that one model is sharded over, or that hold it by tensor parallelism.
        is_sharded: it is sharded: each process gathers all of it to sample, and a layer at a time
            to score.
        offload: the shards are in main memory.
    """
    share = 0.0 if offload else 1 / parts
    resident = [frozen_item("reference model", shape.parameters * share)]
    if reward is not None:
        resident.append(frozen_item("reward model", reward.reward_parameters * share))
    matrices = shape.linear / (1 if is_sharded else parts)
    gathered = [Item("whole weights", FP32 * shape.parameters, "gathered to sample")] * is_sharded
    scored, length = min(batch.sequences, SCORE_BATCH), batch.length
    layer = working_bytes(shape, scored * length, length, bf16=bf16)
    if parts > 1 and not is_sharded:  # tensor parallelism
        shape = replace(shape, whole_logits=True)
    positions = scored * batch.new
    second = block_bytes(replace(shape, whole_logits=False), positions) / 2  # at temperature 1
    logits = block_bytes(shape, positions) + second
    scoring = (
        *copies(0.0 if is_sharded else shape.linear / parts, bf16=bf16),
        Item("one layer", layer, f"{scored} × {length} tokens"),
        Item("logits", logits, f"{scored} × {batch.new} positions, {part_of_vocabulary(shape)}"),
    )
    return Plan(
        f"Memory of each process for the reference outputs, with prompts of {batch.prompt} tokens",
        tuple(resident),
        {
            "sampling": (
                *gathered,
                *sampling_items(shape, batch, bf16=bf16, trained=matrices),
            ),
            "scoring": scoring,
        },
    )
