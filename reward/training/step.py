"""One optimizer step on a batch, and scoring many groups: both spread over all processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from reward.accuracy import CorrectCounts, count_judgments
from reward.data.batches import lay_out, plan_step, to_judgments, total_weight
from reward.data.groups import Group
from reward.data.stored_groups import StoredGroups
from reward.data.thresholds import Thresholds
from reward.losses import Objective, sum_of_losses
from rlhf.modeling.tokens import send
from rlhf.parallel.distributed import global_sum_dict
from rlhf.parallel.sharding import accumulating, backward, clear_gradients, clip_gradients
from rlhf.parallel.waits import waiting
from rlhf.run.metrics import progress
from rlhf.run.watchdog import beat

MAX_GRAD_NORM = 1.0
NO_THUMBS = torch.zeros(0)  # thresholds of a batch without pointwise judgments
Value = TypeVar("Value")


@dataclass(frozen=True)
class TrainState:
    """A prepared module with its optimizer and the numbers that every step needs.

    Attributes:
        tokens_per_batch: tokens in one forward pass.
        shared: a prompt is encoded once for all its responses.
        tensor_parallel: processes that one model is split over.
        bias: added to the head's output, if training starts from a reward model.
        thresholds: of the thumbs.
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
        """Parts of a batch: one for each process, or for each tensor-parallel group."""
        processes: int = self.accelerator.num_processes
        return processes // self.tensor_parallel


def take_step(state: TrainState, groups: Sequence[Group], rate: float) -> dict[str, float]:
    """One optimizer step; every process calls it with the same groups.

    Args:
        state: what is trained.
        groups: the prompts of the whole batch; this process reads its part of them.
        rate: the learning rate of this step.

    Returns:
        The mean loss, the accuracies and the gradient norm, over the whole batch.
    """
    accelerator, module, objective = state.accelerator, state.module, state.objective
    passes = my_passes(state, groups)
    weight = total_weight(groups, objective.loss)
    level = update_thresholds(state, groups)
    outputs: list[tuple[Tensor, Tensor, list[float]]] = []  # read later: a GPU is not waited for
    module.train()
    for number, part in enumerate(passes):
        last = number == len(passes) - 1
        with accumulating(accelerator, module, last=last):
            rewards = forward(state, part)
            with waiting("data"):
                judgments = to_judgments(part, objective.loss, rewards.device)
            thresholds = NO_THUMBS if level is None else state.thresholds.of(part, level)
            sent = send(thresholds, rewards.device)
            loss = sum_of_losses(objective, judgments, rewards, sent)
            # Gradients are averaged over processes: divide by the whole batch's weight / processes.
            backward(accelerator, module, loss * (state.dp_size / weight))
        outputs.append((loss.detach(), rewards.detach(), thresholds.tolist()))
    beat("stepping")
    local = dict.fromkeys(("loss", *CorrectCounts._fields), 0.0)
    for part, (loss, rewards, values) in zip(passes, outputs, strict=True):
        local["loss"] += loss.item()
        for name, count in count_judgments(part, rows_of(part, rewards), values)._asdict().items():
            local[name] += count
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = rate
    norm = clip_gradients(accelerator, module, module.parameters(), MAX_GRAD_NORM)
    state.optimizer.step()
    clear_gradients(module, state.optimizer)
    sums = global_sum_dict(accelerator, local)
    # each process of a tensor-parallel group has counted the same
    sums = {name: value / state.tensor_parallel for name, value in sums.items()}
    loss_sum = sums.pop("loss")
    return {"loss": loss_sum / weight, **CorrectCounts(**sums).accuracies(), "grad_norm": norm}


def update_thresholds(state: TrainState, groups: Sequence[Group]) -> float | None:
    """Score a batch with thumbs, for `Thresholds.update`; its mean reward, None without thumbs."""
    if not any(group.pointwise for group in groups):
        return None
    return state.thresholds.update(groups, _score(state, groups))


def fit_thresholds(state: TrainState, groups: StoredGroups) -> float:
    """Fit the thresholds of thumbs to the present rewards; their mean, 0 without thumbs."""
    if not state.thresholds.sources:
        return 0.0
    return state.thresholds.fit(groups, lambda sample: score_groups(state, sample))


def score_groups(state: TrainState, groups: Sequence[Group]) -> list[list[float]]:
    """Rewards of all responses of all groups, on every process; prompt ids must differ."""
    with progress("scoring", len(my_passes(state, groups))) as bar:
        return _score(state, groups, bar.advance)


def _score(
    state: TrainState, groups: Sequence[Group], after_pass: Callable[[], None] = beat
) -> list[list[float]]:
    passes = my_passes(state, groups)
    rewards: list[Tensor] = []
    state.module.eval()
    with torch.no_grad():
        for part in passes:
            rewards.append(forward(state, part))
            after_pass()
    rows = [
        (group.prompt_id, row)
        for part, values in zip(passes, rewards, strict=True)
        for group, row in zip(part, rows_of(part, values), strict=True)
    ]
    return gather_by_prompt(state.accelerator, rows, groups)


def gather_by_prompt(
    accelerator: Accelerator, results: list[tuple[str, Value]], groups: Sequence[Group]
) -> list[Value]:
    """The results of all processes, by prompt id, put in the order of `groups`."""
    if accelerator.num_processes > 1:
        with waiting("ranks"):
            results = gather_object(results)
    by_prompt = dict(results)
    return [by_prompt[group.prompt_id] for group in groups]


def my_passes(state: TrainState, groups: Sequence[Group]) -> list[list[Group]]:
    """The groups of each forward pass of this process."""
    with waiting("data"):
        plans = plan_step(groups, state.dp_size, state.tokens_per_batch, shared=state.shared)
    return plans[state.accelerator.process_index // state.tensor_parallel]


def forward(state: TrainState, groups: Sequence[Group]) -> Tensor:
    """Rewards of all responses of some groups, in order."""
    with waiting("data"):
        inputs = lay_out(groups, state.pad_id, shared=state.shared)
    rewards: Tensor = state.module(inputs.to(state.accelerator.device))
    return rewards + state.bias


def rows_of(groups: Sequence[Group], rewards: Float[Tensor, " N"]) -> list[list[float]]:
    """The rewards of each group's responses."""
    sizes = [len(group.responses) for group in groups]
    return [row.tolist() for row in rewards.detach().cpu().split(sizes)]
