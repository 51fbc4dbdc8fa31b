"""Fitting the critic's head on the reference outputs, before the policy moves.

The critic is a copy of the reward model, which was trained on whole responses: its scores of
unfinished ones are arbitrary. At the first step the policy is the reference, so the reward of every
stored response is a Monte-Carlo return (λ = 1) for each of its tokens, and the head that predicts
them best from frozen features is a ridge regression: one forward over the reference rows. More
gradient steps on the same rows gained nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.formulas import shape_rewards
from policies.ppo.models.actor_critic import PolicyAndCritic, PolicyHead, call_with_root_gathered
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow
from policies.rewards import reads_tokens
from rlhf.modeling.heads import reward_head
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_config, load_reward_model, model_folder, new_reward_model
from rlhf.parallel.distributed import global_sum
from rlhf.parallel.gathered_model import whole
from rlhf.parallel.sharding import Sharding, assign
from rlhf.run.metrics import progress

MAX_ROWS = 20_000  # more would hardly change a head
BATCH = 32
HELD_OUT_EVERY = 5
ROUNDING = 1e-10  # of targets that are all the same: their variance over their mean square
PENALTIES = tuple(10.0**power for power in range(-4, 2))


@dataclass(frozen=True)
class Moments:
    """The sums that least squares needs of N inputs x (the last column is 1) and targets y.

    `gram` is Σ x xᵀ, `product` Σ x y, `squares` Σ y²; sums over rows add up over processes.
    """

    gram: Float[Tensor, "d d"]
    product: Float[Tensor, " d"]
    squares: Float[Tensor, ""]

    @classmethod
    def of(cls, inputs: Float[Tensor, "N d"], targets: Float[Tensor, " N"]) -> "Moments":
        """The moments of one batch, in float64."""
        x, y = inputs.double(), targets.double()
        return cls(x.T @ x, x.T @ y, y @ y)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.gram + other.gram, self.product + other.product, self.squares + other.squares
        )

    def over_all_ranks(self, accelerator: Accelerator) -> "Moments":
        """The moments of all processes' rows."""
        parts = (self.gram, self.product, self.squares)
        return Moments(*(global_sum(accelerator, part) for part in parts))


def ridge(moments: Moments, penalty: float) -> Float[Tensor, " d"]:
    """argmin_w Σ (y − wᵀx)² + penalty · s · |w|², s the mean Σ x² of a column.

    The weight of the last column, the intercept, is not penalized.
    """
    diagonal = moments.gram.diagonal()[:-1]
    added = torch.nn.functional.pad(torch.full_like(diagonal, penalty) * diagonal.mean(), (0, 1))
    weight: Tensor = torch.linalg.solve(moments.gram + torch.diag(added), moments.product)
    return weight


def residual_variance(moments: Moments, weight: Float[Tensor, " d"]) -> float:
    """Var(y − wᵀx)."""
    count = moments.gram[-1, -1]
    product = moments.gram @ weight
    squared_error = moments.squares - 2 * weight @ moments.product + weight @ product
    mean_error = (moments.product[-1] - product[-1]) / count
    return float(squared_error / count - mean_error**2)


def explained_variance(moments: Moments, weight: Float[Tensor, " d"]) -> float | None:
    """1 − Var(y − wᵀx) / Var(y): 1 is perfect, 0 no better than a constant.

    None where y does not vary.
    """
    count, mean = moments.gram[-1, -1], moments.product[-1] / moments.gram[-1, -1]
    mean_square = float(moments.squares / count)
    variance = mean_square - float(mean) ** 2
    return explained_share(residual_variance(moments, weight), variance, mean_square)


def explained_share(residual: float, variance: float, mean_square: float) -> float | None:
    """1 − residual / variance of targets; None where they are all the same, but for rounding.

    Args:
        residual: variance of targets less predictions.
        variance: of the targets.
        mean_square: of the targets.
    """
    return 1 - residual / variance if variance > ROUNDING * mean_square else None


def new_critic(
    settings: PPOSettings,
    tokenizer: PreTrainedTokenizerBase,
    sharding: Sharding | None = None,
) -> tuple[PreTrainedModel | PolicyHead | None, float]:
    """The critic before any training, and the constant added to its values.

    A copy of the first reward model that reads tokens, else the policy's with a new head; or
    a head alone, on the policy; None where the settings want no critic.
    """
    if not settings.has_critic:
        return None, 0.0
    if settings.critic.model == "head":
        width = load_config(settings.model).get_text_config().hidden_size
        return PolicyHead(width, trains_policy=settings.critic.trains == "all"), 0.0
    models = [name for name in settings.reward if reads_tokens(name)]
    held = (sharding or Sharding()).held(trained=True)
    if models:
        folder = model_folder(models[0], "reward", "model")
        critic = load_reward_model(folder, held=held)
    else:
        pad_id = int(tokenizer.pad_token_id)
        critic = new_reward_model(settings.model, pad_id, settings.seed, held=held)
    if settings.critic.trains == "head":
        critic.requires_grad_(False)
        reward_head(critic).requires_grad_(True)
    return critic, float(getattr(critic.config, "reward_bias", 0.0))


def fit_critic(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    prompts: Sequence[tuple[ReferenceRow, ...]],
    reference_rewards: dict[str, list[float]],
    settings: PPOSettings,
    pad_id: int,
    sharding: Sharding,
) -> dict[str, Any]:
    """Replace the critic's head and bias by those that best predict the stored rewards.

    Every fifth prompt is held out to choose the penalty and to say how good the critic was and
    is; then all rows are fitted.

    Args:
        accelerator: device, precision and processes; each process reads a part of the rows.
        model: its critic is changed, on all processes alike.
        prompts: the reference rows of each training prompt.
        reference_rewards: r(y0) of each prompt's rows, by prompt id.
        settings: how rewards are shaped.
        pad_id: the padding token.
        sharding: how the model is held.

    Returns:
        Explained variance on held-out prompts before and after (None where their rewards do not
        vary), the penalty and the row count.
    """
    prompts = prompts[:MAX_ROWS]
    targets = warmup_targets(prompts, reference_rewards, settings)
    fitted, held_out = call_with_root_gathered(
        model, lambda: _moments(accelerator, model, prompts, targets, pad_id, sharding)
    )
    head = reward_head(model.critic)
    weight = whole(head.weight, accelerator.device)
    before = torch.cat([weight[0], model.value_bias[None]]).double()
    penalty, solution = choose_penalty(fitted, held_out)
    at_first, now = (explained_variance(held_out, w) for w in (before, solution))
    with_bias = ridge(fitted + held_out, penalty).float()
    assign(head.weight, with_bias[None, :-1])
    model.value_bias.copy_(with_bias[-1])
    is_held_out = len(prompts) >= HELD_OUT_EVERY
    where = "held-out prompts" if is_held_out else "the same prompts, too few to hold some out"
    if at_first is None or now is None:
        change = "undefined, as all rewards are equal,"
    else:
        change = f"{at_first:.2f} → {now:.2f}"
    accelerator.print(f"Critic fitted: explained variance {change} on {where}", file=sys.stderr)
    return {
        "held_out": is_held_out,
        "explained_variance": {"before": at_first, "after": now},
        "penalty": penalty,
        "rows": min(len(targets), MAX_ROWS),
    }


def choose_penalty(fitted: Moments, held_out: Moments) -> tuple[float, Float[Tensor, " D"]]:
    """The penalty of `PENALTIES` with the smallest error on held-out rows, and its solution.

    D counts the features and a constant one, whose weight is the bias.
    """
    solutions = {penalty: ridge(fitted, penalty) for penalty in PENALTIES}
    penalty = min(
        solutions, key=lambda candidate: residual_variance(held_out, solutions[candidate])
    )
    return penalty, solutions[penalty]


def warmup_targets(
    prompts: Sequence[tuple[ReferenceRow, ...]],
    reference_rewards: dict[str, list[float]],
    settings: PPOSettings,
) -> Float[Tensor, " N"]:
    """The shaped reward of each reference row, before the baseline of its prompt is subtracted.

    Each row is shaped with the other reference rows of its prompt, as a fresh response is with all
    of them; if a prompt has only one row, the next prompt's are used.
    """
    by_prompt = [reference_rewards[rows[0].prompt.id] for rows in prompts]
    targets = []
    for index, rows in enumerate(prompts):
        mine, borrowed = by_prompt[index], by_prompt[(index + 1) % len(prompts)]
        others = [mine[:i] + mine[i + 1 :] or borrowed for i in range(len(mine))]
        shaped, prompt_baseline = shape_rewards(
            torch.tensor(mine),
            torch.tensor(others),
            torch.tensor([row.finished for row in rows]),
            torch.tensor([len(row.response_ids) for row in rows]),
            **settings.shaping,
        )
        targets.append(shaped + prompt_baseline)
    return torch.cat(targets)


@torch.no_grad()
def _moments(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    prompts: Sequence[tuple[ReferenceRow, ...]],
    targets: Float[Tensor, " N"],
    pad_id: int,
    sharding: Sharding,
) -> tuple[Moments, Moments]:
    """Moments over the response tokens of the fitted and of the held-out prompts."""
    rows = [row for group in prompts for row in group][:MAX_ROWS]
    held_out = torch.tensor(
        [index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index, g in enumerate(prompts) for _ in g]
    )
    # the processes of a tensor-parallel group read the same rows, and each counts them
    group_size = sharding.tensor_parallel
    first, step = accelerator.process_index // group_size, accelerator.num_processes // group_size
    mine = range(first, len(rows), step)
    order = sorted(mine, key=lambda i: len(rows[i].prompt_ids) + len(rows[i].response_ids))
    width = reward_head(model.critic).in_features + 1
    zero = torch.zeros((width, width), dtype=torch.float64, device=accelerator.device)
    sums = [Moments(zero, zero[0], zero[0, 0])] * 2
    parts = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    calls = sharding.equal_calls(accelerator, parts, spare=[[0]])
    with progress("fitting the critic", total=len(order)) as bar, accelerator.autocast():
        for part, is_own in calls:
            sequences = Sequences.of(
                [rows[i].prompt_ids for i in part], [rows[i].response_ids for i in part], pad_id
            ).to(accelerator.device)
            features = torch.nn.functional.pad(model.critic_features(sequences), (0, 1), value=1.0)
            if not is_own:
                continue
            mask = sequences.responses.mask
            expected = targets[part].to(accelerator.device)[:, None].expand(mask.shape)
            for held, total in enumerate(sums):
                chosen = mask & (held_out[part] == bool(held)).to(accelerator.device)[:, None]
                sums[held] = total + Moments.of(features[chosen], expected[chosen])
            bar.advance(len(part))
    fitted, unseen = (part.over_all_ranks(accelerator) for part in sums)
    # too few prompts to hold one out
    return fitted, unseen if unseen.gram[-1, -1] > 0 else fitted
