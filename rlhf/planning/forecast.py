"""What a run will take, before it runs: operations of each phase, hours and price.

    seconds = Σ over phases operations / (rate · utilization)  +  seconds of beginning and end

Operations are those of `rlhf.planning.work` for real tokens; what padding costs makes a utilization
smaller. A utilization is assumed, or follows from a run that was measured (`rlhf.planning.trial`).
Devices are taken to divide the work without loss.

Letters: p tokens of a prompt, r of a response, k responses to it, d hidden size, V vocabulary.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rlhf.planning.plan import KL_ROWS
from rlhf.planning.planner import FP32, Shape
from rlhf.planning.work import Matrices, backward_flops, trunk_flops

Stage = Literal["reward", "reward_lora", "reference", "ppo", "ppo_lora"]
Phase = Literal["sampling", "scoring", "training"]
Phases = dict[Phase, float]

TITLES: dict[Stage, str] = {
    "reward": "train-reward",
    "reward_lora": "train-reward, LoRA",
    "reference": "reference",
    "ppo": "ppo",
    "ppo_lora": "ppo, LoRA",
}
WITH_ADAPTERS = ("reward_lora", "ppo_lora")
ASSUMED: Phases = {"sampling": 0.03, "scoring": 0.3, "training": 0.3}
AUDITED = 64  # answers that PPO samples at its end to measure both KLs
AUDIT_READS = 4  # of the first prompts before training, of the answers, by policy and original
HELD_OUT_READS = 3  # by the base model, before training, after it
DISK = 1e9  # bytes of weights that are read or written in a second
MOVES: dict[Stage, int] = {  # how often a stage loads or saves a model
    "reward": 4,
    "reward_lora": 4,
    "reference": 2,
    "ppo": 5,
    "ppo_lora": 3,
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
        samples: reference outputs of each prompt.
        prompt_tokens: of a prompt, on average.
        response_tokens: of a response, on average.
        epochs: of the reward model over its prompts.
        steps: of PPO.
        episodes: responses of each of these.
        updates: passes over the responses of a step.
    """

    prompts: int = 1000
    held_out: int = 100
    responses: float = 4.0
    samples: int = 1
    prompt_tokens: float = 128.0
    response_tokens: float = 128.0
    epochs: float = 1.0
    steps: int = 100
    episodes: int = 64
    updates: int = 1

    def changed(self, given: dict[str, Any]) -> "Amount":
        """With the given fields in place of its own; those that are None stay."""
        known = {one.name for one in fields(self)}
        kept = {name: value for name, value in given.items() if value is not None and name in known}
        return replace(self, **kept)


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
        found: Phases = {}
        for part in (self.steps, self.around):
            for phase, number in part.items():
                took = number / (speed.rate * speed.utilization[phase])
                found[phase] = found.get(phase, 0.0) + took
        return found


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
    """What a stage will take: seconds of each phase over all devices, hours and price."""

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
    stage: Stage, shape: Shape, amount: Amount, lora_rank: int | None = None
) -> Operations:
    """The operations of a stage.

    Args:
        stage: which one.
        shape: of the model; policy, critic and reward model have the same.
        amount: what it reads and writes.
        lora_rank: of adapters, for the stages that train them.
    """
    sizes = matrices_of(shape, lora_rank if stage in WITH_ADAPTERS else None)
    cost = costs_of(sizes, shape, amount)
    if stage in ("reward", "reward_lora"):
        return _reward(sizes, cost, amount)
    if stage == "reference":
        return _reference(cost, amount)
    return _ppo(cost, amount, has_adapters=stage in WITH_ADAPTERS)


@dataclass(frozen=True)
class Costs:
    """Operations of one response to one prompt.

    Attributes:
        sampled: to sample it, prompt included.
        read: by a model without its output matrix.
        learned: of the backward pass.
        logits: of its tokens.
    """

    sampled: float
    read: float
    learned: float
    logits: float


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


def _reference(cost: Costs, amount: Amount) -> Operations:
    """Every response is sampled, then read by the original model and by the reward model."""
    rows = (amount.prompts + amount.held_out) * amount.samples
    scored = 2 * cost.read + cost.logits
    return Operations({"sampling": rows * cost.sampled, "scoring": rows * scored}, {})


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
