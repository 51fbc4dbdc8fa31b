"""Checks of a run: what must hold in every step, and warnings relative to the reference outputs.

Before any training the policy is the reference model: it must repeat the stored log-probs, and at
the first update KL, approx-KL and clip fraction must be 0 and the entropy positive. Tolerances are
those of the arithmetic: batches of other shapes round differently.

A policy that exploits the reward model earns high rewards for responses that people would not like.
Many such responses can be detected automatically: they lack an end token, get longer or shorter, or
repeat themselves. Each of these problems is a warning first; when it persists, the run stops.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.formulas import FORWARD_KL
from policies.ppo.rollout_metrics import distinct_2
from policies.ppo.setting_groups import GuardSettings
from policies.reference.audit import score_rows
from policies.reference.store import ReferenceRow
from rlhf.errors import GuardError
from rlhf.records.wording import counted
from rlhf.run.checkpoint import last_good

LOG_PROB_TOLERANCE = {"no": 1e-3, "bf16": 0.1}
RATIO_TOLERANCE = {"no": 1e-4, "bf16": 0.02}
MEANS_OVER_UPDATES = ("approx_kl", "clip_fraction", *(name for name, _ in FORWARD_KL.values()))


def check_reference(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ReferenceRow],
    temperature: float,
) -> None:
    """Before the first step: the policy must give reference outputs the stored log-probs.

    Prints how far apart the two are.

    Raises:
        GuardError: recomputed log-probs of reference rows differ from the stored ones.
    """
    recomputed = score_rows(accelerator, policy, tokenizer, rows, temperature)
    stored = torch.cat([torch.tensor(row.log_probs) for row in rows])
    differences = (torch.cat(recomputed) - stored).abs()
    difference = float(differences.mean())
    tolerance = LOG_PROB_TOLERANCE[accelerator.mixed_precision]
    message = f"Log-probs of {len(rows)} reference outputs computed again: "
    message += f"max |Δ| {differences.max():.1e}, mean {difference:.1e} (allowed {tolerance:.0e})"
    accelerator.print(message, file=sys.stderr)
    if not difference <= tolerance:
        raise GuardError(
            f"The policy's log-probs of the reference outputs are off by {difference:.4f} "
            f"nats per token before any training (at most {tolerance} is expected)",
            "The store was made in another precision or with another version: make it again with "
            "rlhf reference.",
        )


def check_step(
    metrics: Mapping[str, float], precision: str, checkpoint: Path | None, *, single_update: bool
) -> None:
    """Stop a run with numbers that cannot be right.

    Args:
        metrics: of the step.
        precision: of accelerate, `no` or `bf16`.
        checkpoint: the newest one.
        single_update: whether a step has one optimizer step, so that all metrics precede it.

    Raises:
        GuardError: a metric is not finite; or, at step 1, the sampler's log-probs are not the
            trainer's, ratio ≠ 1, KL ≠ 0 or entropy = 0.
    """
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise GuardError(
            f"Step {metrics['step']}: {', '.join(bad)} is not a finite number",
            f"{last_good(checkpoint)}. Start a new --out with a lower --optim.learning-rate.",
        )
    if metrics["step"] > 1:
        return
    gap, most = metrics["sampler_gap"], LOG_PROB_TOLERANCE[precision]
    if gap > most:
        raise GuardError(
            f"Step 1: the sampler's log-probs of its own tokens differ by {gap:.4f} nats per token "
            f"from those that training computes (at most {most} is expected)",
            "Use --sampling.engine generate or --precision fp32; report this with your model's "
            "name.",
        )
    if metrics["entropy"] <= 0:
        raise GuardError(
            f"Step 1: the policy's entropy is {metrics['entropy']:.4f}: it does not sample",
            "Use a model whose output distribution is not degenerate.",
        )
    tolerance = RATIO_TOLERANCE[precision]
    zero = ("approx_kl", "clip_fraction", "_per_token")
    for name in (key for key in metrics if key.endswith(zero)):
        if abs(metrics[name]) > tolerance and (single_update or name not in MEANS_OVER_UPDATES):
            raise GuardError(
                f"Step 1: {name} is {metrics[name]:.5f} before the first update, it must be 0 "
                f"(within {tolerance})",
                "Sampling and training disagree about the same tokens. Report this with your "
                "model's name; --precision fp32 may avoid it.",
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceMeans:
    """Means of the reference outputs: length, end tokens, variety, entropy per token."""

    length: float
    eos_rate: float
    distinct_2: float
    entropy: float


def average_references(rows: Sequence[ReferenceRow]) -> ReferenceMeans:
    """Measure reference outputs the way a step's responses are measured."""
    tokens = sum(len(row.response_ids) for row in rows)
    return ReferenceMeans(
        length=tokens / len(rows),
        eos_rate=fmean(row.finished for row in rows),
        distinct_2=fmean(distinct_2(row.response_ids) for row in rows),
        entropy=sum(sum(row.entropy) for row in rows) / tokens,
    )


def find_problems(
    metrics: Mapping[str, float],
    kl: float | None,
    reference_means: ReferenceMeans,
    settings: GuardSettings,
) -> dict[str, str]:
    """The problems of a step, by the name of the guard.

    Args:
        metrics: of the step.
        kl: the measured KL in nats per token; None where none is.
        reference_means: means over the reference outputs.
        settings: how much is too much.
    """
    problems = {}
    if settings.max_kl is not None and kl is not None and kl > settings.max_kl:
        problems["kl"] = (
            f"the KL is {kl:.3f} nats per token, above --guards.max-kl {settings.max_kl:g}"
        )
    if metrics["entropy"] < settings.min_entropy * reference_means.entropy:
        problems["entropy"] = _compare("entropy", metrics["entropy"], reference_means.entropy)
    if metrics["reward/centered"] <= 0:  # the others are signs of hacking only at high rewards
        return problems
    high = " while rewards are above the reference outputs'"
    length, band = metrics["length"], settings.length_band
    if not reference_means.length / band <= length <= reference_means.length * band:
        problems["length"] = _compare("the length", length, reference_means.length) + high
    if metrics["eos_rate"] < reference_means.eos_rate - settings.eos_drop:
        problems["eos"] = (
            _compare(
                "the share of responses that end", metrics["eos_rate"], reference_means.eos_rate
            )
            + high
        )
    if metrics["distinct_2"] < settings.min_distinct * reference_means.distinct_2:
        problems["distinct"] = (
            _compare("distinct-2", metrics["distinct_2"], reference_means.distinct_2) + high
        )
    return problems


def check_guards(
    metrics: Mapping[str, float],
    kl: float | None,
    reference_means: ReferenceMeans,
    settings: GuardSettings,
    counts: Mapping[str, int],
    checkpoint: Path | None,
    warn: Callable[[str], None],
) -> dict[str, int]:
    """Warn of every new problem; stop the run when one has persisted for `patience` steps.

    Args:
        metrics: of the step.
        kl: as in `find_problems`.
        reference_means: means over the reference outputs.
        settings: how much is too much, and for how long.
        counts: what the step before returned.
        checkpoint: the newest one; none is saved while a warning persists that may stop the run.
        warn: called with each new warning.

    Returns:
        For how many consecutive steps each problem has persisted.

    Raises:
        GuardError: a problem has persisted; the message names the checkpoint.
    """
    problems = find_problems(metrics, kl, reference_means, settings)
    updated = {name: counts.get(name, 0) + 1 for name in problems}
    for name, problem in problems.items():
        if updated[name] == 1:
            warn(f"Step {metrics['step']}: {problem}.")
        if settings.patience and updated[name] >= settings.patience:
            lasted = counted(updated[name], "step")
            raise GuardError(
                f"Step {metrics['step']}: {problem}; it has lasted {lasted} "
                f"(--guards.patience {settings.patience})",
                f"{last_good(checkpoint)}. Start a new --out with a stronger KL term, "
                "--rewards.shaping par or a lower --optim.learning-rate; the --guards settings say "
                "what is tolerated.",
            )
    return updated


def _compare(measure: str, value: float, reference_mean: float) -> str:
    return f"{measure} is {value:.2f} (reference outputs: {reference_mean:.2f})"
