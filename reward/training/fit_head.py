"""`--head fitted`: fits a fresh head on frozen features before training all weights.

With a random head the first gradients of the model point in random directions and distort its
features; with few rankings it never recovers. Linear probing, then fine-tuning avoids that (Kumar
et al., arXiv 2202.10054).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from reward.data.batches import to_judgments, total_weight
from reward.data.groups import Group
from reward.data.thresholds import Thresholds
from reward.losses import Objective, sum_of_losses
from reward.model.module import RewardModule
from reward.training.step import TrainState, forward, gather_by_prompt, my_passes
from rlhf.modeling.heads import capture_input, reward_head
from rlhf.parallel.sharding import assign, reshard, unwrap
from rlhf.run.metrics import progress

MAX_RESPONSES = 20_000  # more would hardly change the head, and features take memory
WEIGHT_PENALTY = 1e-3
MAX_ITERATIONS = 200


def fit_head(state: TrainState, groups: Sequence[Group]) -> None:
    """Replace the head's weight by the one that fits the rankings best on frozen features.

    Args:
        state: its module's head is changed, in all processes alike.
        groups: training groups; the first ones, up to MAX_RESPONSES responses, are used.
    """
    chosen: list[Group] = []
    responses = 0
    for group in groups:
        responses += len(group.responses)
        if responses > MAX_RESPONSES:
            break
        chosen.append(group)
    features = _features(state, chosen)
    weight = fit_weight(features, chosen, state.objective, WEIGHT_PENALTY, state.thresholds)
    module: RewardModule = unwrap(state.module)
    reshard(module)
    assign(reward_head(module.classifier).weight, weight)


def fit_weight(
    features: Float[Tensor, "N d"],
    groups: Sequence[Group],
    objective: Objective,
    penalty: float,
    thresholds: Thresholds | None = None,
) -> Float[Tensor, " d"]:
    """argmin_w mean loss over groups, by weight, of the rewards `features @ w`, + penalty · |w|².

    Convex for every objective, so L-BFGS from 0 finds the minimum; in float64, the same in every
    process. With thumbs it also minimizes over the offsets of their thresholds, under the same
    penalty; these are discarded, since `Thresholds.fit` finds them exactly.
    """
    inputs = features.double()
    judgments = to_judgments(groups, objective.loss, inputs.device)
    total = total_weight(groups, objective.loss)
    weight = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    sources = thresholds or Thresholds()
    offsets = torch.zeros(len(sources.sources), dtype=torch.float64, requires_grad=True)
    parameters = [weight, offsets] if len(offsets) else [weight]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe"
    )
    fitted = torch.tensor(
        [sources.is_fitted(source) for source in sources.sources], dtype=torch.bool
    )
    numbers = sources.numbers(groups)

    def loss() -> float:
        optimizer.zero_grad()
        rewards = inputs @ weight
        boundaries = rewards.mean() + (fitted * offsets)[numbers]
        value = sum_of_losses(objective, judgments, rewards, boundaries) / total
        value = value + penalty * (weight.square().sum() + offsets.square().sum())
        value.backward()
        return float(value.detach())

    optimizer.step(loss)
    return weight.detach().float()


def _features(state: TrainState, groups: Sequence[Group]) -> Float[Tensor, "N d"]:
    """The head's input for every response of every group, in order."""
    module: RewardModule = unwrap(state.module)
    features: list[tuple[str, Tensor]] = []
    state.module.eval()
    passes = my_passes(state, groups)
    with (
        progress("fitting the head", len(passes)) as bar,
        capture_input(reward_head(module.classifier)) as read,
        torch.no_grad(),
    ):
        for part in passes:
            forward(state, part)
            sizes = [len(group.responses) for group in part]
            parts = read.pop().float().cpu().split(sizes)
            features += zip([group.prompt_id for group in part], parts, strict=True)
            bar.advance()
    return torch.cat(gather_by_prompt(state.accelerator, features, groups))
