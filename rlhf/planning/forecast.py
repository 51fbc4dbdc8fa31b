"""What a run will take, before it runs: operations of each phase, hours and price.

    seconds = Σ over phases operations / (rate · utilization)  +  seconds of beginning and end

Operations are those of `rlhf.planning.flops` for real tokens; what padding costs makes a
utilization smaller. A utilization is assumed, or follows from a run that was measured
(`rlhf.planning.trial`).
Devices are taken to divide the work without loss.

Letters: p tokens of a prompt, r of a response, k responses to it, d hidden size, V vocabulary.
What trl trains (sft, dpo, distill) is counted as trl computes it on GPUs; on CPUs the log-probs of
sft and dpo are computed at every position.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rlhf.planning.flops import Matrices, backward_flops, trunk_flops
from rlhf.planning.plan import KL_ROWS
from rlhf.planning.planner import FP32, Shape

Stage = Literal[
    "reward", "reward_lora", "reference", "ppo", "ppo_lora", "sft", "dpo", "dpo_lora", "distill"
]
Phase = Literal["sampling", "scoring", "training"]
Phases = dict[Phase, float]

TITLES: dict[Stage, str] = {
    "reward": "train-reward",
    "reward_lora": "train-reward, LoRA",
    "reference": "reference",
    "ppo": "ppo",
    "ppo_lora": "ppo, LoRA",
    "sft": "sft",
    "dpo": "dpo",
    "dpo_lora": "dpo, LoRA",
    "distill": "distill",
}
WITH_ADAPTERS = ("reward_lora", "ppo_lora", "dpo_lora")
ASSUMED: Phases = {"sampling": 0.03, "scoring": 0.3, "training": 0.3}
AUDITED = 64  # responses that PPO samples at its end to measure both KLs
AUDIT_READS = 4  # of the first prompts before training, of the responses, by policy and original
HELD_OUT_READS = 3  # by the base model, before training, after it
HELD_OUT_PASSES = 2  # held-out texts of sft and distill are read before training and after it
DISK = 1e9  # bytes of weights that are read or written in a second
MOVES: dict[Stage, int] = {  # how often a stage loads or saves a model
    "reward": 4,
    "reward_lora": 4,
    "reference": 2,
    "ppo": 5,
    "ppo_lora": 3,
    "sft": 5,  # a checkpoint has weights and two moments
    "dpo": 5,
    "dpo_lora": 2,
    "distill": 4,  # the teacher; its student, of half the size, as sft and once more
}
COUNTED = 1000  # prompts whose tokens a report counts
HOUR = 3600
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much a run reads and writes; the reports of finished runs have theirs.

    Attributes:
        prompts: to train on.
        held_out: prompts that measure the result.
        responses: to each prompt that a reward model reads.
        pairs: of these that DPO reads; None: all k·(k − 1)/2.
        samples: reference outputs of each prompt.
        prompt_tokens: of a prompt, on average.
        response_tokens: of a response, on average.
        epochs: over the prompts; PPO has steps.
        steps: of PPO.
        episodes: responses of each of these.
        updates: passes over the responses of a step.
        on_policy: share of the batches that a student samples itself.
    """

    prompts: int = 1000
    held_out: int = 100
    responses: float = 4.0
    pairs: float | None = None
    samples: int = 1
    prompt_tokens: float = 128.0
    response_tokens: float = 128.0
    epochs: float = 1.0
    steps: int = 100
    episodes: int = 64
    updates: int = 1
    on_policy: float = 0.5

    @property
    def pairs_per_prompt(self) -> float:
        """Pairs of responses that DPO reads of each prompt."""
        return self.responses * (self.responses - 1) / 2 if self.pairs is None else self.pairs

    def changed(self, given: dict[str, Any]) -> "Amount":
        """With the given fields in place of its own; those that are None stay."""
        known = {field.name for field in fields(self)}
        changes = {
            name: value for name, value in given.items() if value is not None and name in known
        }
        return replace(self, **changes)


def stride(prompts: int) -> int:
    """From one prompt whose tokens are counted to the next: COUNTED are enough for means."""
    return max(1, prompts // COUNTED)


@dataclass(frozen=True)
class Operations:
    """Of all devices, by phase: in the steps that are repeated, and before and after them."""

    steps: Phases
    around: Phases

    def seconds(self, speed: "Speed") -> Phases:
        """Seconds of each phase on one device that does everything."""
        seconds: Phases = {}
        for part in (self.steps, self.around):
            for phase, number in part.items():
                took = number / (speed.rate * speed.utilization[phase])
                seconds[phase] = seconds.get(phase, 0.0) + took
        return seconds


@dataclass(frozen=True)
class Speed:
    """How fast a device works.

    Attributes:
        rate: operations a second of a large matrix product.
        utilization: the share of it that each phase reaches.
        start: seconds that a stage takes besides its phases: models are loaded and saved.
    """

    rate: float
    utilization: Phases
    start: float


@dataclass(frozen=True)
class Forecast:
    """Forecast of a stage: seconds of each phase over all devices, hours and price."""

    seconds: Phases
    start_seconds: float
    device_hours: float
    hours: float
    price: float


def forecast(operations: Operations, speed: Speed, gpus: int, price_per_hour: float) -> Forecast:
    """Hours and price of a stage on `gpus` devices, all of which wait while models are loaded."""
    seconds = operations.seconds(speed)
    whole = sum(seconds.values()) + speed.start * gpus
    return Forecast(
        seconds=seconds,
        start_seconds=speed.start,
        device_hours=whole / HOUR,
        hours=whole / gpus / HOUR,
        price=whole / HOUR * price_per_hour,
    )


def assumed_start(stage: Stage, shape: Shape) -> float:
    """Seconds to load and save the models of a stage, in float32."""
    return MOVES[stage] * FP32 * shape.parameters / DISK


def count_operations(
    stage: Stage,
    shape: Shape,
    amount: Amount,
    lora_rank: int | None = None,
    student: Shape | None = None,
) -> Operations:
    """The operations of a stage.

    Args:
        stage: which one.
        shape: of the model; policy, critic, reward model and teacher have the same.
        amount: what it reads and writes.
        lora_rank: of adapters, for the stages that train them.
        student: the shape of what distillation trains; without one it is as large as its teacher.
    """
    sizes = matrices_of(shape, lora_rank if stage in WITH_ADAPTERS else None)
    cost = costs_of(sizes, shape, amount)
    if stage in ("reward", "reward_lora"):
        return _reward(sizes, cost, amount)
    if stage == "reference":
        return _reference(sizes, cost, amount)
    if stage == "sft":
        return _sft(cost, amount)
    if stage in ("dpo", "dpo_lora"):
        original = costs_of(matrices_of(shape, None), shape, amount)
        return _dpo(cost, original, amount, has_adapters=stage in WITH_ADAPTERS)
    if stage == "distill":
        small = student or shape
        return _distill(costs_of(matrices_of(small, None), small, amount), cost, amount)
    return _ppo(cost, amount, has_adapters=stage in WITH_ADAPTERS)


@dataclass(frozen=True)
class Costs:
    """Operations of one response to one prompt.

    Attributes:
        sampled: to sample it, prompt included.
        read: by a model without its output matrix.
        learned: of the backward pass.
        logits: of its tokens.
        all_logits: of its tokens and those of the prompt.
    """

    sampled: float
    read: float
    learned: float
    logits: float
    all_logits: float


def costs_of(sizes: Matrices, shape: Shape, amount: Amount) -> Costs:
    """A sampled token is multiplied with all tokens before it, in all r·p + r²/2 of them."""
    prompt, response = amount.prompt_tokens, amount.response_tokens
    whole = prompt + response
    logits = 2.0 * response * shape.hidden * shape.vocabulary
    sampled_pairs = prompt**2 + response * prompt + response**2 / 2
    return Costs(
        sampled=trunk_flops(sizes, whole, sampled_pairs) + logits,
        read=trunk_flops(sizes, whole, whole**2),
        learned=backward_flops(sizes, whole, whole**2),
        logits=logits,
        all_logits=2.0 * whole * shape.hidden * shape.vocabulary,
    )


def _reward(sizes: Matrices, cost: Costs, amount: Amount) -> Operations:
    """Every prompt is read in one row with its k responses, which has p + k·r tokens.

    Held-out prompts are also read by the base model, with logits.
    """
    prompt, own = amount.prompt_tokens, amount.responses * amount.response_tokens
    pairs = prompt**2 + own * (prompt + amount.response_tokens)
    read = trunk_flops(sizes, prompt + own, pairs)
    learned = backward_flops(sizes, prompt + own, pairs)
    around = amount.held_out * (HELD_OUT_READS * read + amount.responses * cost.logits)
    return Operations(
        {"training": amount.epochs * amount.prompts * (read + learned)}, {"training": around}
    )


def _reference(sizes: Matrices, cost: Costs, amount: Amount) -> Operations:
    """A prompt is read once for all its responses, by the model and by the reward model.

    A sampled token is multiplied with all tokens before it.
    """
    prompts, prompt = amount.prompts + amount.held_out, amount.prompt_tokens
    own, response = amount.samples * amount.response_tokens, amount.response_tokens
    sampled = trunk_flops(sizes, prompt + own, prompt**2 + own * (prompt + response / 2))
    read = trunk_flops(sizes, prompt + own, prompt**2 + own * (prompt + response))
    logits = amount.samples * cost.logits
    return Operations(
        {"sampling": prompts * (sampled + logits), "scoring": prompts * (2 * read + logits)}, {}
    )


def _ppo(cost: Costs, amount: Amount, *, has_adapters: bool) -> Operations:
    """Policy, critic and reward model read each response; the first two also learn from it.

    Logits are computed again in the backward pass, and multiplied for the gradients of the hidden
    states and, where it is trained, of the output matrix. Before training the critic reads all
    reference outputs; after it both KLs are measured.
    """
    episodes = amount.steps * amount.episodes
    critic = cost.read + cost.learned
    policy = critic + cost.logits * (3 if has_adapters else 4)
    audited = min(AUDITED, amount.held_out or amount.prompts)
    audit = AUDIT_READS * audited * (cost.read + cost.logits)
    fitted = amount.prompts * amount.samples * cost.read
    return Operations(
        {
            "sampling": episodes * cost.sampled,
            "scoring": episodes * (3 * cost.read + cost.logits),
            "training": episodes * amount.updates * (policy + critic + KL_ROWS * policy),
        },
        {"sampling": audited * cost.sampled, "scoring": audit + fitted},
    )


def _sft(cost: Costs, amount: Amount) -> Operations:
    """Every response is read and learned; its logits are computed again in the backward pass."""
    read = cost.read + cost.logits
    return Operations(
        {"training": amount.epochs * amount.prompts * (read + cost.learned + 3 * cost.logits)},
        {"training": HELD_OUT_PASSES * amount.held_out * read},
    )


def _dpo(cost: Costs, original: Costs, amount: Amount, *, has_adapters: bool) -> Operations:
    """Both responses of a pair are read with the prompt, and once by the original model.

    That reads all pairs before the first step; with adapters it reads those of each step, without
    its adapters. Held-out pairs are measured once, after training.
    """
    responses = 2 * amount.pairs_per_prompt
    read, before = cost.read + cost.logits, original.read + original.logits
    learned = read + cost.learned + cost.logits * (2 if has_adapters else 3)
    steps = amount.epochs * amount.prompts * responses
    around = amount.held_out * responses * (read + before)
    if has_adapters:
        return Operations({"training": steps * (learned + before)}, {"training": around})
    around += amount.prompts * responses * before
    return Operations({"training": steps * learned}, {"training": around})


def _distill(student: Costs, teacher: Costs, amount: Amount) -> Operations:
    """Student and teacher read each output, or what the student samples in its place.

    Both have logits at every position; the student's stay for the backward pass.
    """
    outputs = amount.epochs * amount.prompts * amount.samples
    read = student.read + student.all_logits + teacher.read + teacher.all_logits
    measured = HELD_OUT_PASSES * amount.held_out * amount.samples
    return Operations(
        {
            "sampling": outputs * amount.on_policy * student.sampled,
            "training": outputs * (read + student.learned + 2 * student.all_logits),
        },
        {"training": measured * read},
    )


def matrices_of(shape: Shape, lora_rank: int | None) -> Matrices:
    """The matrices of a model that trains all weights, or adapters on every linear layer."""
    adapters = (lora_rank or 0) * shape.lora_rows
    everything = shape.trunk_linear + adapters
    return Matrices(
        all=everything,
        reached=everything,
        trained=everything if lora_rank is None else adapters,
        recomputed=everything,
        query_width=shape.query_width * shape.layers,
    )
