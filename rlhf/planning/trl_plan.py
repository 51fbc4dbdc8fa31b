"""How much memory the trainings need that trl runs: supervised fine-tuning and DPO."""

from rlhf.planning.plan import Item, Pass, Plan
from rlhf.planning.planner import (
    Shape,
    activation_bytes,
    copies,
    frozen_item,
    gradient_item,
    logits_bytes,
    stepping_items,
    trained_items,
)


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
