"""Evaluation while training: how good the weights are now, which were best, and when to stop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from reward.data.groups import Group
from reward.objective import sum_of_losses, total_weight
from reward.report.accuracy import add_counts, count_right, count_right_thumbs
from reward.step import TrainState, name_accuracies, score_groups


@dataclass(frozen=True)
class Best:
    """The step and loss of the best evaluation so far, and how many came after it."""

    step: int
    loss: float
    since: int = 0

    def is_stale(self, patience: int) -> bool:
        """True when `patience` evaluations in a row were no better; never for a patience of 0."""
        return 0 < patience <= self.since


def compare(best: Best | None, step: int, loss: float) -> Best:
    """The best evaluation, this one included; the earlier of two equal ones."""
    if best is None or loss < best.loss or math.isnan(best.loss):
        return Best(step, loss)
    return replace(best, since=best.since + 1)


def evaluate(trainee: TrainState, groups: Sequence[Group]) -> dict[str, float]:
    """Loss, as in training, and accuracy of some groups, on every process."""
    rewards = score_groups(trainee, groups)
    flat = torch.tensor([value for row in rewards for value in row])
    objective, thresholds = trainee.objective, trainee.thresholds
    said = thresholds.of(groups, float(flat.mean()))
    total = sum_of_losses(objective, groups, flat, said)
    loss = float(total) / total_weight(objective, groups)
    pairs = add_counts(count_right(group, row) for group, row in zip(groups, rewards, strict=True))
    thumbs = count_right_thumbs(groups, rewards, said.tolist())
    named = name_accuracies(*pairs, *thumbs)
    return {"validation_loss": loss} | {f"validation_{name}": named[name] for name in named}
