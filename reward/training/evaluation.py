"""Evaluation during training: loss and accuracy, the best weights so far, and early stopping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from reward.accuracy import count_judgments
from reward.data.batches import to_judgments, total_weight
from reward.data.groups import Group
from reward.losses import sum_of_losses
from reward.training.step import TrainState, score_groups


@dataclass(frozen=True)
class Best:
    """The step and loss of the best evaluation so far, and the number of evaluations since."""

    step: int
    loss: float
    since: int = 0

    def is_stale(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations were not better; never without a patience."""
        return patience is not None and patience <= self.since


def compare(best: Best | None, step: int, loss: float) -> Best:
    """The best evaluation, this one included; the earlier of two equal ones."""
    if best is None or loss < best.loss or math.isnan(best.loss):
        return Best(step, loss)
    return replace(best, since=best.since + 1)


def evaluate(state: TrainState, groups: Sequence[Group]) -> dict[str, float]:
    """Loss, as in training, and accuracy of some groups, on every process."""
    rewards = score_groups(state, groups)
    flat = torch.tensor([value for row in rewards for value in row])
    objective = state.objective
    thresholds = state.thresholds.of(groups, float(flat.mean()))
    judgments = to_judgments(groups, objective.loss, flat.device)
    total = sum_of_losses(objective, judgments, flat, thresholds)
    loss = float(total) / total_weight(groups, objective.loss)
    accuracies = count_judgments(groups, rewards, thresholds.tolist()).accuracies()
    return {"validation_loss": loss} | {
        f"validation_{name}": accuracies[name] for name in accuracies
    }
