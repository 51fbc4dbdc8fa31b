"""What must hold before and while a policy is trained; a run that breaks it is stopped.

Before any training the policy is the reference model: it must repeat the stored log-probs, and at
the first update KL, approx-KL and clip fraction must be 0 and the entropy positive. Tolerances are
those of the arithmetic: batches of other shapes round differently.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.ppo.update import KL_ESTIMATORS
from policies.reference.audit import score_responses
from policies.reference.store import ReferenceRow
from rlhf.errors import GuardError
from rlhf.run.checkpoint import last_good

LOG_PROB_TOLERANCE = {"no": 1e-3, "bf16": 0.1}
RATIO_TOLERANCE = {"no": 1e-4, "bf16": 0.02}
MEANS_OVER_UPDATES = ("approx_kl", "clip_fraction", *(name for name, _ in KL_ESTIMATORS.values()))


def check_reference(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ReferenceRow],
    temperature: float,
) -> None:
    """Before the first step: the policy must say of y0 what the store says the reference said.

    Prints how far apart the two are.

    Raises:
        GuardError: recomputed log-probs of stored rows differ from the stored ones.
    """
    recomputed = score_responses(
        accelerator,
        policy,
        tokenizer,
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        temperature,
    )
    stored = torch.cat([torch.tensor(row.log_probs) for row in rows])
    differences = (torch.cat(recomputed) - stored).abs()
    difference = float(differences.mean())
    words = (
        f"Log-probs of {len(rows)} stored outputs computed again: max |Δ| {differences.max():.1e}"
    )
    accelerator.print(f"{words}, mean {difference:.1e}", file=sys.stderr)
    tolerance = LOG_PROB_TOLERANCE[accelerator.mixed_precision]
    if not difference <= tolerance:
        raise GuardError(
            f"The policy's log-probs of the stored reference outputs are off by {difference:.4f} "
            f"nats per token before any training (at most {tolerance} is expected)",
            "The store was made in another precision or with another version: make it again with "
            "rlhf reference.",
        )


def check_step(
    row: Mapping[str, float], precision: str, checkpoint: Path | None, *, single_update: bool
) -> None:
    """Stop a run whose numbers nobody should trust.

    Args:
        row: the step's metrics.
        precision: of accelerate, `no` or `bf16`.
        checkpoint: the newest one.
        single_update: whether a step has one, before which all its metrics were measured.

    Raises:
        GuardError: a metric is not finite; or, at step 1, the sampler's log-probs are not the
            trainer's, ratio ≠ 1, KL ≠ 0 or entropy = 0.
    """
    bad = [name for name, value in row.items() if not math.isfinite(value)]
    if bad:
        raise GuardError(
            f"Step {row['step']}: {', '.join(bad)} is not a finite number",
            f"{last_good(checkpoint)}. Start a new --out with a lower --optim.learning-rate.",
        )
    if row["step"] > 1:
        return
    gap, most = row["sampler_gap"], LOG_PROB_TOLERANCE[precision]
    if gap > most:
        raise GuardError(
            f"Step 1: the sampler's log-probs of its own tokens are {gap:.4f} nats a token off "
            f"those that training sees (at most {most} is expected)",
            "Use --sampling.engine generate or --precision fp32; report this with your model's "
            "name.",
        )
    if row["entropy"] <= 0:
        raise GuardError(
            f"Step 1: the policy's entropy is {row['entropy']:.4f}: it does not sample",
            "Use a model whose output distribution is not degenerate.",
        )
    tolerance = RATIO_TOLERANCE[precision]
    zero = ("approx_kl", "clip_fraction", "_per_token")
    for name in (key for key in row if key.endswith(zero)):
        if abs(row[name]) > tolerance and (single_update or name not in MEANS_OVER_UPDATES):
            raise GuardError(
                f"Step 1: {name} is {row[name]:.5f} before the first update, it must be 0 "
                f"(within {tolerance})",
                "Sampling and training disagree about the same tokens. Report this with your "
                "model's name; --precision fp32 may avoid it.",
            )
