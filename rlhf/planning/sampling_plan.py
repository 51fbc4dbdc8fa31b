"""How much memory sampling takes in each process, and with it `rlhf reference`; as in `planner`."""

import math
from dataclasses import replace

from rlhf.modeling.log_probs import SCORE_BATCH
from rlhf.planning.plan import Item, MemoryPhase, Plan, SampleBatch, ShardLayout
from rlhf.planning.planner import (
    FP32,
    Shape,
    block_bytes,
    copies,
    frozen_item,
    frozen_precision,
    kv_cache_bytes,
    logits_bytes,
    part_of_vocabulary,
    tensor_parallel_shape,
    working_bytes,
)

VLLM_PAGE = 128  # tokens; a multiple of what its backends have
VLLM_TOKENS = 8192  # in one of its passes, at most; its own choice is this or twice as many


def sampling_items(
    shape: Shape, batch: SampleBatch, *, bf16: bool, trained: float | None = None
) -> tuple[Item, ...]:
    """Memory that sampling adds: copies of `trained` weights, of all matrices where it is None."""
    count, prompt = batch.sequences, batch.prompt
    cache = kv_cache_bytes(shape, count * batch.length, bf16=bf16)
    layer = working_bytes(shape, count * prompt, prompt, bf16=bf16)
    return (
        *copies(shape.linear if trained is None else trained, bf16=bf16),
        Item("keys and values", cache, f"{count} sequences of {prompt} + {batch.new} tokens"),
        Item("one layer of the prompts", layer, f"{count} × {prompt} tokens"),
        Item("logits", logits_bytes(shape, count), f"{count} distributions"),
    )


def vllm_items(
    shape: Shape, batch: SampleBatch, parts: int, *, bf16: bool, lora_rank: int = 0
) -> tuple[Item, ...]:
    """Memory that vLLM takes in each of `parts` processes that share it; none if these are 0.

    With bf16 it gets adapters of `lora_rank`; else they are merged.
    """
    if not parts:
        return ()
    size, precision = frozen_precision(bf16=bf16)
    part, sequences = tensor_parallel_shape(shape, parts), batch.sequences * parts
    cache = vllm_cache_bytes(part, sequences, batch.length, size)
    share = "a copy" if parts == 1 else f"a copy in {parts} parts"
    adapters = float(size * lora_rank * shape.lora_rows if bf16 else 0)
    return (
        Item("vLLM: weights", float(size * part.parameters), f"{precision}, {share}"),
        Item(
            "vLLM: keys and values",
            float(cache),
            f"{sequences + 1} sequences of {batch.length} tokens",
        ),
        *((Item("vLLM: adapters", adapters, precision),) if adapters else ()),
    )


def vllm_pass(shape: Shape, batch: SampleBatch, parts: int, *, bf16: bool) -> Item:
    """What vLLM computes with at a time: a layer of its largest pass, or the logits.

    It runs such a pass when it starts, too. Beside the residual and the normed input (2·d) a layer
    holds gate, up and their product (3·f), or queries, keys, values and the output (2·q + 2·k), of
    its part. Of logits there are those of the model, and in float32 a copy, log-probs,
    probabilities and random numbers, on every process those of the whole vocabulary.
    """
    size, _ = frozen_precision(bf16=bf16)
    part, requests = tensor_parallel_shape(shape, parts), batch.sequences * parts
    tokens = vllm_pass_tokens(requests, batch.length)
    inside = max((3 if shape.gated else 2) * part.inner, 2 * part.query_width + 2 * part.key_width)
    layer = float(size * tokens * (2 * shape.hidden + inside))
    logits = float((size + (4 if bf16 else 3) * FP32) * requests * shape.vocabulary)
    if layer >= logits:
        return Item("vLLM: layer at work", layer, f"{tokens} tokens")
    return Item("vLLM: logits", logits, f"{requests} distributions")


def vllm_at_work(
    shape: Shape,
    batch: SampleBatch,
    parts: int,
    *,
    bf16: bool,
    is_gathered: bool,
    has_adapters: bool,
    merges: bool,
) -> tuple[Item, ...]:
    """What is computed while vLLM gets the policy's weights, or while it samples.

    Args:
        shape: of the policy.
        batch: what is sampled at once.
        parts: processes that share the vLLM.
        bf16: vLLM's precision.
        is_gathered: the policy is sharded.
        has_adapters: the policy has some, which vLLM gets without the weights, or merged.
        merges: they are merged.
    """
    sampling = vllm_pass(shape, batch, parts, bf16=bf16)
    if has_adapters and not merges:
        return (sampling,)
    loading = _vllm_loading(shape, parts, bf16=bf16, is_gathered=is_gathered, merges=has_adapters)
    return (max(sampling, loading, key=lambda item: item.size),)


def _vllm_loading(shape: Shape, parts: int, *, bf16: bool, is_gathered: bool, merges: bool) -> Item:
    """The largest layer that vLLM is given.

    vLLM keeps what it is given until a layer is whole (gate and up are one), then makes the layer
    and copies it. What is gathered, or merged with adapters in float32, is given as a copy.
    """
    size, precision = frozen_precision(bf16=bf16)
    copied = (FP32 if merges else size) * is_gathered
    fused = (2 if shape.gated else 1) * shape.inner * shape.hidden
    product = FP32 * shape.inner * shape.hidden * merges  # of one matrix's adapters
    layers = (
        (FP32 if merges else copied) * fused + product + size * fused / parts,
        (copied + size / parts) * shape.vocabulary * shape.hidden,
    )
    return Item("vLLM: layer given", float(max(layers)), f"the largest; {precision} there")


def vllm_pass_tokens(requests: int, length: int) -> int:
    """Tokens of vLLM's largest pass: all of the requests, up to a limit; at least one of them.

    `length` is that of prompt and response together.
    """
    return max(length, requests, min(requests * length, VLLM_TOKENS))


def vllm_cache_bytes(shape: Shape, requests: int, length: int, size: int) -> int:
    """Bytes of pages for `requests` responses and one more, `length` tokens each with the prompt.

    A number has `size` bytes.
    """
    tokens = (requests + 1) * VLLM_PAGE * math.ceil(length / VLLM_PAGE)
    return 2 * size * shape.layers * shape.key_width * tokens


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
    if vllm:  # its weights are of the model's folder
        sampling: tuple[Item, ...] = (vllm_pass(shape, batch, vllm, bf16=bf16),)
    else:
        sampling = (*gathered, *sampling_items(shape, batch, bf16=bf16, trained=matrices))
    return Plan(
        f"Memory of each process for the reference outputs, with prompts of {batch.prompt} tokens",
        (*always, *(vllm_items(shape, batch, vllm, bf16=bf16) if vllm else ())),
        {MemoryPhase.SAMPLING: sampling, MemoryPhase.SCORING: scoring},
    )
