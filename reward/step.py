"""One optimizer step on a global batch, and scoring of many groups; both over all processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from reward.accuracy import add_counts, count_right, count_right_thumbs
from reward.batches import lay_out, plan_step
from reward.groups import Group
from reward.objective import Objective, sum_of_losses, total_weight
from reward.thresholds import Thresholds
from rlhf.distributed import global_sum
from rlhf.metrics import progress
from rlhf.sharding import accumulating, backward, clip_gradients
from rlhf.watchdog import beat

MAX_GRAD_NORM = 1.0
Value = TypeVar("Value")


@dataclass(frozen=True)
class Trainee:
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
    def shares(self) -> int:
        """Parts of a batch: a process has one, or processes that hold a model together."""
        processes: int = self.accelerator.num_processes
        return processes // self.tensor_parallel


def take_step(trainee: Trainee, groups: Sequence[Group], rate: float) -> dict[str, float]:
    """One optimizer step on a global batch; every process calls it with the same groups.

    Args:
        trainee: what is trained.
        groups: the prompts of the whole batch; this process takes its share.
        rate: the learning rate of this step.
    """
    accelerator, module = trainee.accelerator, trainee.module
    passes = my_passes(trainee, groups)
    weight = total_weight(trainee.objective, groups)
    thresholds = trainee.thresholds
    totals = _tally(trainee, [], torch.zeros(0), torch.zeros(()))
    module.train()
    for number, part in enumerate(passes):
        last = number == len(passes) - 1
        with accumulating(accelerator, module, last=last):
            rewards = forward(trainee, part)
            loss = sum_of_losses(trainee.objective, part, rewards, thresholds.of(part))
            # Gradients are averaged over processes: divide by the whole batch's weight / processes.
            backward(accelerator, module, loss * (trainee.shares / weight))
        totals += _tally(trainee, part, rewards, loss)
    beat("stepping")
    for parameters in trainee.optimizer.param_groups:
        parameters["lr"] = rate
    norm = clip_gradients(accelerator, module, module.parameters(), MAX_GRAD_NORM)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    summed = global_sum(accelerator, totals) / trainee.tensor_parallel
    loss_sum = float(summed[0])
    thresholds.move(summed[5:].view(-1, 3))
    accuracies = name_accuracies(*summed[1:5].tolist())
    return {"loss": loss_sum / weight, **accuracies, "grad_norm": norm}


def fit_thresholds(trainee: Trainee, groups: Sequence[Group]) -> None:
    """Fit the thresholds of thumbs to the rewards as they are now; does nothing without thumbs."""
    sample = trainee.thresholds.sample(groups)
    if sample:
        trainee.thresholds.fit(sample, score_groups(trainee, sample))


def name_accuracies(
    right: float, pairs: float, right_thumbs: float, thumbs: float
) -> dict[str, float]:
    """Accuracy on pairs, and on pointwise judgements, of those that there are.

    A step of ties alone has 0, as no other step tells.
    """
    found = {"accuracy": right / max(pairs, 1)} if pairs or not thumbs else {}
    return found | ({"thumbs_accuracy": right_thumbs / thumbs} if thumbs else {})


def score_groups(trainee: Trainee, groups: Sequence[Group]) -> list[list[float]]:
    """Rewards of all responses of all groups, on every process; prompt ids must differ."""
    passes = my_passes(trainee, groups)
    found: list[tuple[str, list[float]]] = []
    trainee.module.eval()
    with progress("scoring", len(passes)) as bar, torch.no_grad():
        for part in passes:
            rewards = forward(trainee, part)
            found += zip([group.prompt_id for group in part], _split(part, rewards), strict=True)
            bar.advance()
    return gather_by_prompt(trainee.accelerator, found, groups)


def gather_by_prompt(
    accelerator: Accelerator, found: list[tuple[str, Value]], groups: Sequence[Group]
) -> list[Value]:
    """What all processes found out by prompt id, in the order of groups, on every process."""
    if accelerator.num_processes > 1:
        found = gather_object(found)
    by_prompt = dict(found)
    return [by_prompt[group.prompt_id] for group in groups]


def my_passes(trainee: Trainee, groups: Sequence[Group]) -> list[list[Group]]:
    """The forward passes of this process: which groups meet in each."""
    plans = plan_step(groups, trainee.shares, trainee.tokens_per_batch, shared=trainee.shared)
    return plans[trainee.accelerator.process_index // trainee.tensor_parallel]


def forward(trainee: Trainee, groups: Sequence[Group]) -> Tensor:
    """Rewards of all responses of some groups, in order."""
    inputs = lay_out(groups, trainee.pad_id, shared=trainee.shared)
    rewards: Tensor = trainee.module(inputs.to(trainee.accelerator.device))
    return rewards + trainee.bias


def _tally(
    trainee: Trainee, groups: Sequence[Group], rewards: Tensor, loss: Tensor
) -> Float[Tensor, " 5+3*S"]:
    """Loss, right pairs, pairs, right thumbs, thumbs, and what `Thresholds.tally` found."""
    thresholds = trainee.thresholds
    rows = list(_split(groups, rewards))
    right, pairs = add_counts(count_right(*one) for one in zip(groups, rows, strict=True))
    right_thumbs, thumbs = add_counts(
        count_right_thumbs(group, values, thresholds.of([group]).tolist())
        for group, values in zip(groups, rows, strict=True)
    )
    numbers = torch.tensor([loss.item(), right, pairs, right_thumbs, thumbs], dtype=torch.float64)
    return torch.cat([numbers, thresholds.tally(groups, rows).flatten()])


def _split(groups: Sequence[Group], rewards: Tensor) -> Iterator[list[float]]:
    """The rewards of each group, in order."""
    values: list[float] = rewards.detach().tolist()
    for group in groups:
        yield values[: len(group.responses)]
        values = values[len(group.responses) :]
