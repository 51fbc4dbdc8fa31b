"""How much memory trainings of one model need: reward models, supervised fine-tuning and DPO."""

from dataclasses import replace

from rlhf.parallel.settings import State
from rlhf.planning.plan import Item, Pass, Plan
from rlhf.planning.planner import (
    Shape,
    activation_bytes,
    copies,
    frozen_item,
    frozen_precision,
    gradient_item,
    logits_bytes,
    packed_bytes,
    stepped_item,
    stepping_items,
    trained_items,
)


def reward_plan(
    shape: Shape,
    computing: Pass,
    *,
    bf16: bool,
    has_stepped_copy: bool = False,
    adapter: str = "none",
    lora_rank: int = 0,
    has_masters: bool = False,
) -> Plan:
    """Training a reward model, with `adapter` none, lora or qlora.

    With `bf16` multiplications and frozen weights are bf16; `has_stepped_copy`: the optimizer steps
    a copy of the weights, as DeepSpeed does; `has_masters`: weights and gradients are bf16, but for
    the head's, with float32 masters.
    """
    full = adapter == "none"
    parameters = shape.reward_parameters if full else lora_rank * shape.lora_rows + shape.hidden
    if not full:  # frozen weights are bf16, and so is what passes from layer to layer
        computing = replace(computing, bf16_weights=bf16, lora_rank=lora_rank)
    activations = activation_bytes(shape, computing, bf16=bf16, padded=False)
    rounded = shape.trunk if has_masters else None
    copied = shape.trunk_linear if full else parameters
    gradients = (
        gradient_item(parameters, rounded),
        *copies(0 if has_masters else copied, bf16=bf16),
        Item("activations", activations, f"{computing.tokens} tokens in a forward pass"),
    )
    frozen = () if full else (_beneath_adapters(shape, adapter, bf16=bf16),)
    name = "reward model" if full else "adapters and head"
    stepped = (stepped_item(name, parameters),) if has_stepped_copy else ()
    return Plan(
        "Memory of each process for the reward model",
        (*frozen, *trained_items(name, parameters, rounded=rounded), *stepped),
        {
            "computing gradients": gradients,
            "stepping": stepping_items(parameters, rounded, shape),
        },
    )


def _beneath_adapters(shape: Shape, adapter: str, *, bf16: bool) -> Item:
    """The frozen trunk."""
    size, words = frozen_precision(bf16=bf16)
    held, why = float(size * shape.trunk), f"{words}, frozen"
    if adapter != "lora":
        held = packed_bytes(shape, shape.trunk, size)
        why = f"4 bits, frozen; embeddings in {words}"
    return Item("reward model: weights", held, why, State.WEIGHTS)


def sft_plan(
    shape: Shape, *, sequences: int, length: int, bf16: bool, checkpointing: bool, processes: int
) -> Plan:
    """Fine-tuning a language model: `sequences` padded to `length` in each forward pass."""
    computing = Pass(sequences * length, length, checkpointing)
    activations = activation_bytes(shape, computing, bf16=bf16, padded=True)
    gradients = (
        gradient_item(shape.parameters),
        *copies(shape.linear, bf16=bf16),
        Item("activations", activations, f"{sequences} sequences of {length} tokens"),
        Item("logits", logits_bytes(shape, computing.tokens), "and their gradients"),
    )
    return Plan(
        "Memory of each process for supervised fine-tuning",
        tuple(trained_items("model", shape.parameters, buckets=processes > 1)),
        {"computing gradients": gradients, "stepping": stepping_items(shape.parameters)},
    )


def dpo_plan(
    shape: Shape, computing: Pass, *, bf16: bool, processes: int, lora_rank: int = 0
) -> Plan:
    """DPO: one model; the original's log-probs are computed before, or with its adapter off.

    Logits are computed a few positions at a time and not kept. `computing` is a forward pass of
    pairs: both answers, each with the prompt. With a `lora_rank` of 0 all weights are trained.
    """
    parameters = lora_rank * shape.lora_rows or shape.parameters
    computing = replace(computing, lora_rank=lora_rank)
    activations = activation_bytes(shape, computing, bf16=bf16, padded=True)
    sequences = computing.tokens // computing.length
    gradients = (
        gradient_item(parameters),
        *copies(parameters if lora_rank else shape.linear, bf16=bf16),
        Item("activations", activations, f"{sequences} sequences of {computing.length} tokens"),
    )
    frozen = (frozen_item("model", shape.parameters),) if lora_rank else ()
    return Plan(
        "Memory of each process for DPO",
        (
            *frozen,
            *trained_items("adapters" if lora_rank else "model", parameters, buckets=processes > 1),
        ),
        {"computing gradients": gradients, "stepping": stepping_items(parameters)},
    )


def fine_tuning_plans(
    shape: Shape, computing: Pass, *, bf16: bool, processes: int, lora_rank: int
) -> dict[str, Plan]:
    """What each process needs for `rlhf sft` and `rlhf dpo`, which shard nothing.

    `computing` is a forward pass of sequences that are all as long as the longest. DPO reads pairs,
    so of one sequence two; `lora_rank` is that of its adapters.
    """
    sequences = computing.tokens // computing.length
    pairs = replace(computing, tokens=2 * -(-sequences // 2) * computing.length)
    sft = sft_plan(
        shape,
        sequences=sequences,
        length=computing.length,
        bf16=bf16,
        checkpointing=computing.checkpointing,
        processes=processes,
    )
    whole, adapted = (
        dpo_plan(shape, pairs, bf16=bf16, processes=processes, lora_rank=rank)
        for rank in (0, lora_rank)
    )
    return {"sft": sft, "dpo": whole, "dpo LoRA": adapted}
