"""A memory plan: its items, how they are sharded, and its table."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from rlhf.parallel.settings import SHARDED, MemoryKind, Strategy

GIB = 2**30
STAGES = ("reward", "reference", "ppo")  # that are planned
KL_ROWS = 0.5  # reference outputs in the KL term for each prompt, --kl.rows-per-prompt


class MemoryPhase(StrEnum):
    """What a stage is doing while it needs memory; the values are headings of the table."""

    LOADING = "loading"
    SAMPLING = "sampling"
    SCORING = "scoring"
    READING = "reading the rollout"
    MEASURING_KL = "measuring the KL"
    AUDITING = "auditing"
    AUDITING_IN_TRAINING = "auditing during training"
    GRADIENTS = "computing gradients"
    GRADIENTS_OF_TEXTS = "computing gradients of texts"
    STEPPING = "stepping"


@dataclass(frozen=True)
class Item:
    """One line of a plan: what takes memory, how many bytes, why, and which state it is."""

    what: str
    size: float
    why: str
    state: MemoryKind = MemoryKind.ACTIVATIONS


@dataclass(frozen=True)
class ShardLayout:
    """How `--sharding` places the state of a training on the processes of its group.

    Attributes:
        strategy: which state is sharded.
        parts: processes that one copy is sharded over.
        offload: sharded state is kept in main memory.
        processes: in the group.
        bf16_weights: as with `--precision bf16-weights`.
    """

    strategy: Strategy = "auto"
    parts: int = 1
    offload: bool = False
    processes: int = 1
    bf16_weights: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether float32 masters are held beside bf16 weights; under FSDP, its parts are these."""
        return self.bf16_weights and not SHARDED[self.strategy]

    @property
    def reads_sharded(self) -> bool:
        """Whether a layer at a time is gathered to measure, and the original model is sharded."""
        return self.strategy == "fsdp"

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds only a part of the weights."""
        return self.shards(MemoryKind.WEIGHTS)

    def shards(self, state: MemoryKind) -> bool:
        """Whether each process holds only a part of it."""
        return state in SHARDED[self.strategy]

    def held(self, state: MemoryKind, size: float) -> float:
        """Bytes on each device of a state of `size` bytes."""
        if state is MemoryKind.COPIES and self.shards_weights:
            return 0.0
        if not self.shards(state):
            return size
        return 0.0 if self.offload else size / self.parts

    def on_device(self, item: Item) -> Item:
        """An item with its bytes on each device."""
        return replace(item, size=self.held(item.state, item.size))


@dataclass(frozen=True)
class Pass:
    """The size of one forward and backward pass.

    Attributes:
        tokens: in all sequences.
        length: of the longest sequence, in tokens.
        checkpointing: activations are recomputed in the backward pass.
        bf16_weights: what passes from layer to layer is bf16, as embeddings and norms are.
        lora_rank: of adapters that are trained beside frozen weights; 0: all weights are trained.
    """

    tokens: int
    length: int
    checkpointing: bool = False
    bf16_weights: bool = False
    lora_rank: int = 0


@dataclass(frozen=True)
class SampleBatch:
    """Sequences that are sampled at once.

    Attributes:
        sequences: how many.
        prompt: tokens of the longest prompts.
        new: tokens of the longest responses.
    """

    sequences: int
    prompt: int
    new: int

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt + self.new


@dataclass(frozen=True)
class PPOBatch:
    """How much a PPO step has in memory at one time.

    Attributes:
        sampled: sequences sampled at once.
        episodes: in one forward and backward pass.
        reference_rows: reference outputs of the KL term beside them, which the critic does not
            read.
        rollout: episodes of a step in this process, for which a critic's head keeps what it reads.
        texts: pretraining texts in one forward and backward pass, and the tokens of each.
    """

    sampled: SampleBatch
    episodes: int
    reference_rows: int = 0
    rollout: int = 0
    texts: tuple[int, int] = (0, 0)


def count_rows(prompts: int, rows_per_prompt: float) -> int:
    """Reference rows of one process in the KL term of a step: R · prompts, at least one."""
    return max(1, round(prompts * rows_per_prompt))


def rows_in_pass(rows: int, minibatches: int, passes: int) -> int:
    """The most of a step's reference rows in one pass: optimizer steps and passes share evenly."""
    return math.ceil(math.ceil(rows / minibatches) / passes)


@dataclass(frozen=True)
class Plan:
    """What a stage needs in each process.

    Attributes:
        title: of its table.
        always: what is held in every phase.
        phases: what each of them adds.
        loading: what is held before, while nothing else is.
    """

    title: str
    always: tuple[Item, ...]
    phases: dict[MemoryPhase, tuple[Item, ...]]
    loading: tuple[Item, ...] = ()

    @property
    def peak(self) -> float:
        """Bytes at the peak: what is always held and the largest phase, or loading."""
        held = sum(item.size for item in self.always)
        phases = max(sum(item.size for item in phase) for phase in self.phases.values())
        return max(held + phases, sum(item.size for item in self.loading))

    @property
    def text(self) -> str:
        """The plan as a table: what, GiB, why."""
        rows = [(item.what, _gib(item.size), item.why) for item in self.always]
        for phase, items in self.phases.items():
            rows.append((f"while {phase}", "", ""))
            rows += [(f"  {item.what}", _gib(item.size), item.why) for item in items]
        if self.loading:
            rows.append(("before, while loading", "", ""))
            rows += [(f"  {item.what}", _gib(item.size), item.why) for item in self.loading]
        why = "what is always held, and the phase with the highest peak"
        rows.append(("peak", _gib(self.peak), why))
        width = max(len(what) for what, _, _ in rows)
        lines = [f"{what:<{width}}  {size:>7}  {why}".rstrip() for what, size, why in rows]
        return "\n".join([self.title, f"{'':<{width}}  {'GiB':>7}", *lines])


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.4f}"


def shard_plan(plan: Plan, layout: ShardLayout) -> Plan:
    """Shard a plan for one process that holds everything; gathered state is not counted."""
    is_split = layout.offload or layout.parts > 1
    storage = "in main memory" if layout.offload else f"sharded over {layout.parts}"

    def held(items: Iterable[Item]) -> tuple[Item, ...]:
        return tuple(
            replace(item, size=layout.held(item.state, item.size), why=f"{item.why}; {storage}")
            if is_split and layout.shards(item.state)
            else item
            for item in items
            if item.state is not MemoryKind.COPIES or layout.held(item.state, item.size)
        )

    gathers = is_split and layout.shards_weights
    return Plan(
        f"{plan.title}, without gathered weights" if gathers else plan.title,
        held(plan.always),
        {phase: held(items) for phase, items in plan.phases.items()},
        whole_weights(
            layout, sum(item.size for item in plan.always if item.state is MemoryKind.WEIGHTS)
        ),
    )


def whole_weights(layout: ShardLayout, size: float) -> tuple[Item, ...]:
    """Memory that ZeRO 3 needs while loading: all weights, `size` bytes, before it shards them."""
    if layout.strategy != "zero3":
        return ()
    return (Item("whole weights", size, "moved to the device before ZeRO 3 shards them"),)


def with_whole_gradient(plan: Plan, size: float) -> Plan:
    """A plan with the end of the backward pass under tensor parallelism.

    The gradient of split embeddings comes whole, `size` bytes, to every process. Activations are
    gone by then.
    """
    items = plan.phases[MemoryPhase.GRADIENTS]
    computed = [item for item in items if item.state is MemoryKind.ACTIVATIONS]
    if size <= sum(item.size for item in computed):
        return plan
    whole = Item("embeddings: gradient", size, "whole, when activations are gone")
    held = tuple(item for item in items if item not in computed)
    return replace(plan, phases={**plan.phases, MemoryPhase.GRADIENTS: (*held, whole)})
