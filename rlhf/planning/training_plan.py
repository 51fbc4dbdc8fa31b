"""How much memory trainings of one model need: reward models, supervised fine-tuning and DPO."""

from dataclasses import replace

from rlhf.parallel.settings import MemoryKind
from rlhf.planning.plan import Item, MemoryPhase, Pass, Plan
from rlhf.planning.planner import (
    BF16,
    FP32,
    Shape,
    activation_bytes,
    copies,
    frozen_item,
    frozen_precision,
    gradient_item,
    packed_bytes,
    stepped_item,
    stepping_items,
    trained_items,
)

TILE = (4096, 32768)  # positions and tokens of the vocabulary, trl.kernels.chunked_logprob
CPU_TILES = 8  # as measured
DIVERGENCE = 17  # tensors of float32 logits at the peak of trl's generalized_jsd_loss, as measured


def reward_plan(
    shape: Shape,
    one_pass: Pass,
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
        one_pass = replace(one_pass, bf16_weights=bf16, lora_rank=lora_rank)
    activations = activation_bytes(shape, one_pass, bf16=bf16, padded=False)
    rounded = shape.trunk if has_masters else None
    copied = shape.trunk_linear if full else parameters
    gradients = (
        gradient_item(parameters, rounded),
        *copies(0 if has_masters else copied, bf16=bf16),
        Item("activations", activations, f"{one_pass.tokens} tokens in a forward pass"),
    )
    frozen = () if full else (_beneath_adapters(shape, adapter, bf16=bf16),)
    name = "reward model" if full else "adapters and head"
    stepped = (stepped_item(name, parameters),) if has_stepped_copy else ()
    return Plan(
        "Memory of each process for the reward model",
        (*frozen, *trained_items(name, parameters, rounded=rounded), *stepped),
        {
            MemoryPhase.GRADIENTS: gradients,
            MemoryPhase.STEPPING: stepping_items(parameters, rounded, shape),
        },
    )


def _beneath_adapters(shape: Shape, adapter: str, *, bf16: bool) -> Item:
    """The frozen trunk."""
    size, precision = frozen_precision(bf16=bf16)
    held, why = float(size * shape.trunk), f"{precision}, frozen"
    if adapter != "lora":
        held = packed_bytes(shape, shape.trunk, size)
        why = f"4 bits, frozen; embeddings in {precision}"
    return Item("reward model: weights", held, why, MemoryKind.WEIGHTS)


def sft_plan(
    shape: Shape, one_pass: Pass, *, bf16: bool, processes: int, on_cpu: bool = False
) -> Plan:
    """Fine-tuning a language model; `one_pass` is a forward pass of padded sequences."""
    gradients = (
        gradient_item(shape.parameters),
        *copies(shape.linear, bf16=bf16),
        _activations(shape, one_pass, bf16=bf16),
        *_fused_head(shape, one_pass, bf16=bf16, on_cpu=on_cpu),
    )
    return Plan(
        "Memory of each process for supervised fine-tuning",
        tuple(trained_items("model", shape.parameters, buckets=processes > 1)),
        {MemoryPhase.GRADIENTS: gradients, MemoryPhase.STEPPING: stepping_items(shape.parameters)},
    )


def dpo_plan(
    shape: Shape,
    one_pass: Pass,
    *,
    bf16: bool,
    processes: int,
    lora_rank: int = 0,
    on_cpu: bool = False,
) -> Plan:
    """DPO: one model; the original's log-probs are computed before, or with its adapter off.

    `one_pass` is a forward pass of pairs: both answers, each with the prompt. With a `lora_rank`
    of 0 all weights are trained.
    """
    parameters = lora_rank * shape.lora_rows or shape.parameters
    one_pass = replace(one_pass, lora_rank=lora_rank)
    gradients = (
        gradient_item(parameters),
        *copies(parameters if lora_rank else shape.linear, bf16=bf16),
        _activations(shape, one_pass, bf16=bf16),
        *_fused_head(shape, one_pass, bf16=bf16, on_cpu=on_cpu),
    )
    frozen = (frozen_item("model", shape.parameters),) if lora_rank else ()
    return Plan(
        "Memory of each process for DPO",
        (
            *frozen,
            *trained_items("adapters" if lora_rank else "model", parameters, buckets=processes > 1),
        ),
        {MemoryPhase.GRADIENTS: gradients, MemoryPhase.STEPPING: stepping_items(parameters)},
    )


def _fused_head(shape: Shape, one_pass: Pass, *, bf16: bool, on_cpu: bool) -> tuple[Item, ...]:
    """Log-probs of trl's fused head, a tile of logits at a time, and what is added to gradients.

    A GPU has one tile, in the precision of the products; a CPU, which has no such kernel, eight in
    float32.
    """
    positions, columns = min(one_pass.tokens, TILE[0]), min(shape.vocabulary, TILE[1])
    each = CPU_TILES * FP32 if on_cpu else BF16 if bf16 else FP32
    tile = Item("logits", float(each * positions * columns), f"{positions} × {columns} at a time")
    if one_pass.lora_rank:
        return (tile,)
    size = float(FP32 * shape.hidden * shape.vocabulary)
    return (tile, Item("gradient of the output matrix", size, "float32, added to the gradients"))


def distill_plan(
    teacher: Shape, student: Shape, one_pass: Pass, *, bf16: bool, processes: int
) -> Plan:
    """Distilling a policy: the student is trained, its teacher is frozen, both read every token.

    Both have float32 logits at every position; with those that the Jensen-Shannon divergence makes
    of them there are 17 at its peak (examples/benchmarks/plan.py). Sampling needs less.
    """
    logits = float(DIVERGENCE * FP32 * student.vocabulary * one_pass.tokens)
    gradients = (
        gradient_item(student.parameters),
        *copies(student.linear, bf16=bf16),
        _activations(student, one_pass, bf16=bf16),
        Item("logits", logits, "of student and teacher, and the divergence of each token"),
    )
    return Plan(
        "Memory of each process for distillation",
        (
            frozen_item("teacher", teacher.parameters),
            *trained_items("student", student.parameters, buckets=processes > 1),
        ),
        {
            MemoryPhase.GRADIENTS: gradients,
            MemoryPhase.STEPPING: stepping_items(student.parameters),
        },
    )


def distill_reward_plan(
    teacher: Shape, student: Shape, one_pass: Pass, *, bf16: bool, processes: int
) -> Plan:
    """Distilling a reward model: the teacher scores all responses before the student is loaded."""
    parameters = student.reward_parameters
    gradients = (
        gradient_item(parameters),
        *copies(student.trunk_linear, bf16=bf16),
        _activations(student, one_pass, bf16=bf16),
    )
    return Plan(
        "Memory of each process for the distillation of a reward model",
        tuple(trained_items("student", parameters, buckets=processes > 1)),
        {MemoryPhase.GRADIENTS: gradients, MemoryPhase.STEPPING: stepping_items(parameters)},
        (frozen_item("teacher", teacher.reward_parameters),),
    )


def _activations(shape: Shape, one_pass: Pass, *, bf16: bool) -> Item:
    """Of sequences that are padded to the longest."""
    sequences = one_pass.tokens // one_pass.length
    return Item(
        "activations",
        activation_bytes(shape, one_pass, bf16=bf16, padded=True),
        f"{sequences} sequences of {one_pass.length} tokens",
    )


def fine_tuning_plans(
    shape: Shape,
    student: Shape,
    one_pass: Pass,
    *,
    bf16: bool,
    processes: int,
    lora_rank: int,
) -> dict[str, Plan]:
    """What each process needs for `rlhf sft`, `rlhf dpo` and `rlhf distill`, which shard nothing.

    `one_pass` is a forward pass of sequences that are all as long as the longest. DPO reads pairs,
    so of one sequence two; `lora_rank` is that of its adapters. The teacher of `student` has the
    `shape`.
    """
    sequences = one_pass.tokens // one_pass.length
    pairs = replace(one_pass, tokens=2 * -(-sequences // 2) * one_pass.length)
    sft = sft_plan(shape, one_pass, bf16=bf16, processes=processes)
    whole, adapted = (
        dpo_plan(shape, pairs, bf16=bf16, processes=processes, lora_rank=rank)
        for rank in (0, lora_rank)
    )
    small = distill_plan(shape, student, one_pass, bf16=bf16, processes=processes)
    return {"sft": sft, "dpo": whole, "dpo LoRA": adapted, "distill": small}
