"""The metrics of a step's rollout."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from policies.formulas import masked_moments, matches_sampler
from policies.ppo.models.critic import explained_share
from policies.ppo.rollout import Episodes, Experience, RolloutContext, Scores, TokenStats
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceStore
from rlhf.parallel.distributed import global_sum, global_sum_dict
from rlhf.planning.forecast import stride

PER_TOKEN = ("entropy", "sampler_gap")  # the others are means over episodes


def sample_metrics(
    accelerator: Accelerator, episodes: Episodes, scores: Scores, measured: TokenStats
) -> dict[str, float]:
    """Means over all episodes, and over all tokens, of all processes."""
    mask = episodes.mask
    lengths = mask.sum(dim=1).tolist()
    ids = episodes.sequences.responses.ids.tolist()
    variety = sum(distinct_2(row[:length]) for row, length in zip(ids, lengths, strict=True))
    local: dict[str, Tensor | float] = {
        "reward/mean": scores.raw.sum(),
        "reward/centered": scores.centered.sum(),
        "reward/shaped": scores.shaped.sum(),
        "eos_rate": episodes.finished.sum(),
        "length": mask.sum(),
        "entropy": measured.entropy.sum(),
        "distinct_2": torch.tensor(variety),
        "sampler_gap": (episodes.sampler_log_probs - measured.log_probs)[mask].abs().sum(),
        "episodes": len(lengths),
    }
    sums = global_sum_dict(accelerator, local)
    num_episodes, num_tokens = sums.pop("episodes"), sums["length"]
    return {
        name: value / (num_tokens if name in PER_TOKEN else num_episodes)
        for name, value in sums.items()
    }


def forecast_amount(
    settings: PPOSettings, store: ReferenceStore, history: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The amount that the run read and wrote, for forecasts: `rlhf.planning.forecast.Amount`."""
    prompts = store.by_prompt("train")
    lengths = [len(prompts[n][0].prompt_ids) for n in range(0, len(prompts), stride(len(prompts)))]
    return {
        "prompts": len(prompts),
        "held_out": len(store.by_prompt("test")),
        "samples": store.manifest["samples_per_prompt"],
        "prompt_tokens": fmean(lengths),
        "response_tokens": fmean(row["length"] for row in history),
        "steps": len(history),
        "episodes": settings.batch.episodes_per_step,
        "updates": settings.optim.epochs,
    }


def distinct_2(ids: Sequence[int]) -> float:
    """Fraction of distinct pairs of neighboring tokens within a response; 1 if it has none."""
    pairs = list(pairwise(ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def sampler_metrics(
    context: RolloutContext, episodes: Episodes, experience: Experience, cap: float
) -> dict[str, float]:
    """How far the sampler was corrected for, over all processes; nothing where it was not.

    The effective sample size is Kish's, (Σ w)² / Σ w², as a fraction of the tokens.
    """
    accelerator = context.accelerator
    weights, mask = experience.sampler_weights, experience.loss_mask
    if weights is None:
        return {}
    moments = global_sum(accelerator, masked_moments(weights, mask))
    count, total, squares = moments.clamp(min=1e-12).tolist()
    capped = global_sum(accelerator, ((weights >= cap) & mask).sum())
    metrics = {
        "sampler/capped_fraction": float(capped) / count,
        "sampler/effective_sample_size": total**2 / (count * squares),
    }
    if context.sampler_correction == "sequence":
        near = matches_sampler(
            experience.old_log_probs, episodes.sampler_log_probs, episodes.mask, cap
        )
        sums = global_sum_dict(accelerator, {"masked": (~near).sum(), "responses": len(near)})
        metrics["sampler/masked_fraction"] = sums["masked"] / sums["responses"]
    return metrics


def value_metrics(accelerator: Accelerator, experience: Experience) -> dict[str, float]:
    """The fraction of the returns' variance that the critic predicted, over all processes.

    Nothing where all returns are the same.
    """
    mask = experience.response_mask
    moments = [
        global_sum(accelerator, masked_moments(values, mask))
        for values in (experience.returns, experience.returns - experience.old_values)
    ]
    returns, residual = (
        float(squares / count - (total / count) ** 2) for count, total, squares in moments
    )
    count, _, squares = moments[0]
    share = explained_share(residual, returns, float(squares / count))
    return {} if share is None else {"value/explained_variance": share}
