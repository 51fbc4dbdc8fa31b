"""How much memory `rlhf reference` needs in each process; as in `planner`."""

from dataclasses import replace

from rlhf.modeling.log_probs import SCORE_BATCH
from rlhf.planning.plan import Item, MemoryPhase, Plan, SampleBatch, ShardLayout
from rlhf.planning.planner import (
    FP32,
    Shape,
    block_bytes,
    copies,
    frozen_item,
    part_of_vocabulary,
    sampling_items,
    vllm_items,
    working_bytes,
)


def reference_plan(
    shape: Shape,
    reward: Shape | None,
    batch: SampleBatch,
    *,
    bf16: bool,
    layout: ShardLayout | None = None,
    vllm: int = 0,
) -> Plan:
    """Reference outputs: one frozen model samples and scores; a reward model is optional.

    Args:
        shape: the model that answers.
        reward: the reward model, if any.
        batch: sequences sampled at once, and, up to SCORE_BATCH, scored.
        bf16: autocast.
        layout: how the models are sharded; by default not at all. Of a sharded model each process
            gathers all to sample, and a layer at a time to score. With parts that are not sharded,
            the processes hold it by tensor parallelism.
        vllm: processes that share a vLLM, which samples with weights of its own; 0: no vLLM.
    """
    layout = layout or ShardLayout()
    parts, is_sharded = layout.parts, layout.shards_weights
    share = 0.0 if layout.offload else 1 / parts
    always = [frozen_item("reference model", shape.parameters * share)]
    if reward is not None:
        always.append(frozen_item("reward model", reward.reward_parameters * share))
    matrices = shape.linear / (1 if is_sharded else parts)
    whole = Item("whole weights", FP32 * shape.parameters, "gathered to sample")
    gathered = [whole] if is_sharded else []
    scored, length = min(batch.sequences, SCORE_BATCH), batch.length
    layer = working_bytes(shape, scored * length, length, bf16=bf16)
    if parts > 1 and not is_sharded:  # tensor parallelism; the shape is that of the whole model
        shape = replace(shape, whole_logits=True)
    positions = scored * batch.new
    second = block_bytes(replace(shape, whole_logits=False), positions) / 2  # at temperature 1
    logits = block_bytes(shape, positions) + second
    scoring = (
        *copies(0.0 if is_sharded else shape.linear / parts, bf16=bf16),
        Item("one layer", layer, f"{scored} × {length} tokens"),
        Item("logits", logits, f"{scored} × {batch.new} positions, {part_of_vocabulary(shape)}"),
    )
    sampling = (*gathered, *sampling_items(shape, batch, bf16=bf16, trained=matrices))
    return Plan(
        f"Memory of each process for the reference outputs, with prompts of {batch.prompt} tokens",
        (*always, *(vllm_items(shape, batch, vllm, bf16=bf16) if vllm else ())),
        {**({} if vllm else {MemoryPhase.SAMPLING: sampling}), MemoryPhase.SCORING: scoring},
    )
