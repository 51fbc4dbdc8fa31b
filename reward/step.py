"""One optimizer step on a global batch, and scoring of many groups; both over all processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from reward.data.batches import lay_out, plan_step
from reward.data.groups import Group
from reward.data.thresholds import Thresholds
from reward.objective import Objective, sum_of_losses, total_weight
from reward.report.accuracy import add_counts, count_right, count_right_thumbs
from rlhf.parallel.distributed import global_sum
from rlhf.parallel.sharding import accumulating, backward, clip_gradients
from rlhf.run.metrics import progress
from rlhf.run.watchdog import beat

MAX_GRAD_NORM = 1.0
Value = TypeVar("Value")


@dataclass(frozen=True)
class TrainState:
    """A prepared module with its optimizer and the numbers that every step needs.

    `bias` is what a reward model that the training goes on from adds to its head's outputs.
    """

    accelerator: Accelerator
    module: nn.Module
    optimizer: Optimizer
    pad_id: int
    tokens_per_batch: int
    objective: Objective
    shared: bool
    tensor_parallel: int = 1
    bias: float = 0.0
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def dp_size(self) -> int:
        """Parts of a batch: a process has one, or processes that hold a model together."""
        processes: int = self.accelerator.num_processes
        return processes // self.tensor_parallel


def take_step(trainee: TrainState, groups: Sequence[Group], rate: float) -> dict[str, float]:
    """One optimizer step on a global batch; every process calls it with the same groups.

    Args:
        trainee: what is trained.
        groups: the prompts of the whole batch; this process takes its share.
        rate: the learning rate of this step.
    """
    accelerator, module = trainee.accelerator, trainee.module
    passes = my_passes(trainee, groups)
    weight = total_weight(trainee.objective, groups)
    level = follow_thumbs(trainee, groups)
    totals = torch.zeros(5, dtype=torch.float64)  # loss, right and all pairs, right and all thumbs
    module.train()
    for number, part in enumerate(passes):
        last = number == len(passes) - 1
        with accumulating(accelerator, module, last=last):
            rewards = forward(trainee, part)
            said = trainee.thresholds.of(part, level)
            loss = sum_of_losses(trainee.objective, part, rewards, said)
            # Gradients are averaged over processes: divide by the whole batch's weight / processes.
            backward(accelerator, module, loss * (trainee.dp_size / weight))
        totals += _tally(part, rewards, said, loss)
    beat("stepping")
    for parameters in trainee.optimizer.param_groups:
        parameters["lr"] = rate
    norm = clip_gradients(accelerator, module, module.parameters(), MAX_GRAD_NORM)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    summed = global_sum(accelerator, totals) / trainee.tensor_parallel
    loss_sum, *counts = summed.tolist()
    return {"loss": loss_sum / weight, **name_accuracies(*counts), "grad_norm": norm}


def follow_thumbs(trainee: TrainState, groups: Sequence[Group]) -> float:
    """Score a batch that has thumbs, for `Thresholds.follow`; its level, which is 0 without any."""
    if not any(group.pointwise for group in groups):
        return 0.0
    return trainee.thresholds.follow(groups, _score(trainee, groups))


def fit_thresholds(trainee: TrainState, groups: Sequence[Group]) -> float:
    """Fit the thresholds of thumbs to the rewards as they are now; their level, 0 without any."""
    if not trainee.thresholds.sources:
        return 0.0
    return trainee.thresholds.fit(groups, lambda sample: score_groups(trainee, sample))


def name_accuracies(
    right: float, pairs: float, right_thumbs: float, thumbs: float
) -> dict[str, float]:
    """Accuracy on pairs, and on pointwise judgements, of those that there are.

    A step of ties alone has 0, as no other step tells.
    """
    found = {"accuracy": right / max(pairs, 1)} if pairs or not thumbs else {}
    return found | ({"thumbs_accuracy": right_thumbs / thumbs} if thumbs else {})


def score_groups(trainee: TrainState, groups: Sequence[Group]) -> list[list[float]]:
    """Rewards of all responses of all groups, on every process; prompt ids must differ."""
    with progress("scoring", len(my_passes(trainee, groups))) as bar:
        return _score(trainee, groups, bar.advance)


def _score(
    trainee: TrainState, groups: Sequence[Group], after_pass: Callable[[], None] = beat
) -> list[list[float]]:
    found: list[tuple[str, list[float]]] = []
    trainee.module.eval()
    with torch.no_grad():
        for part in my_passes(trainee, groups):
            rewards = forward(trainee, part)
            found += zip([group.prompt_id for group in part], _split(part, rewards), strict=True)
            after_pass()
    return gather_by_prompt(trainee.accelerator, found, groups)


def gather_by_prompt(
    accelerator: Accelerator, found: list[tuple[str, Value]], groups: Sequence[Group]
) -> list[Value]:
    """What all processes found out by prompt id, in the order of groups, on every process."""
    if accelerator.num_processes > 1:
        found = gather_object(found)
    by_prompt = dict(found)
    return [by_prompt[group.prompt_id] for group in groups]


def my_passes(trainee: TrainState, groups: Sequence[Group]) -> list[list[Group]]:
    """The forward passes of this process: which groups meet in each."""
    plans = plan_step(groups, trainee.dp_size, trainee.tokens_per_batch, shared=trainee.shared)
    return plans[trainee.accelerator.process_index // trainee.tensor_parallel]


def forward(trainee: TrainState, groups: Sequence[Group]) -> Tensor:
    """Rewards of all responses of some groups, in order."""
    inputs = lay_out(groups, trainee.pad_id, shared=trainee.shared)
    rewards: Tensor = trainee.module(inputs.to(trainee.accelerator.device))
    return rewards + trainee.bias


def _tally(
    groups: Sequence[Group], rewards: Tensor, thresholds: Float[Tensor, " T"], loss: Tensor
) -> Float[Tensor, "5"]:
    """Loss, and of pairs and of thumbs how many are right and how many there are."""
    rows = list(_split(groups, rewards))
    pairs = add_counts(count_right(*one) for one in zip(groups, rows, strict=True))
    thumbs = count_right_thumbs(groups, rows, thresholds.tolist())
    return torch.tensor([loss.item(), *pairs, *thumbs], dtype=torch.float64)


def _split(groups: Sequence[Group], rewards: Tensor) -> Iterator[list[float]]:
    """The rewards of each group, in order."""
    values: list[float] = rewards.detach().tolist()
    for group in groups:
        yield values[: len(group.responses)]
        values = values[len(group.responses) :]
