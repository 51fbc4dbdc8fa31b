"""True KLs of a policy: forward on stored reference outputs, reverse with the reference loaded.

The reverse KL of a policy's own samples cannot come from a store; it needs the reference's
log-probs of fresh samples. Training never loads the reference model; this audit does, and says
so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.generate import Sample
from policies.log_probs import Sequences, log_probs_of, response_logits
from policies.losses import MAX_LOG_RATIO, reverse_kl_k1, reverse_kl_k3
from policies.reference_store import ReferenceRow, ReferenceStore, require_reference_of
from rlhf.models import describe_model, load_causal_lm
from rlhf.tokens import pad_left, pad_right

SCORE_BATCH = 32


@torch.no_grad()
def score_responses(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    temperature: float,
) -> list[Tensor]:
    """Log-probs of every response token, one tensor per response, in the order given."""
    pad_id = int(tokenizer.pad_token_id)
    order = sorted(range(len(responses)), key=lambda row: len(responses[row]))
    scored: dict[int, Tensor] = {}
    for first in range(0, len(order), SCORE_BATCH):
        rows = order[first : first + SCORE_BATCH]
        sequences = Sequences(
            pad_left([prompts[row] for row in rows], pad_id),
            pad_right([responses[row] for row in rows], pad_id),
        ).to(accelerator.device)
        with accelerator.autocast():
            logits = response_logits(model, sequences, temperature)
        log_probs = log_probs_of(logits, sequences.responses).cpu()
        scored |= {row: log_probs[i, : len(responses[row])] for i, row in enumerate(rows)}
    return [scored[row] for row in range(len(responses))]


def load_reference_model(store: ReferenceStore, accelerator: Accelerator) -> PreTrainedModel:
    """Load the model that made a store, for an audit.

    Raises:
        InputError: the model is not where the manifest says, or has changed.
    """
    path = store.manifest["model"]["path"]
    require_reference_of(store, describe_model(path))
    model: PreTrainedModel = load_causal_lm(path).to(accelerator.device)
    model.eval()
    return model


def audit_reverse_kl(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    samples: Sequence[Sample],
    temperature: float,
) -> dict[str, Any]:
    """KL(policy ‖ reference) from the policy's own samples, with both models loaded."""
    responses = [sample.token_ids for sample in samples]
    ours = score_responses(accelerator, policy, tokenizer, prompts, responses, temperature)
    theirs = score_responses(accelerator, reference, tokenizer, prompts, responses, temperature)
    pairs = list(zip(ours, theirs, strict=True))
    return {
        **_estimate([_row(reverse_kl_k1, a, b) for a, b in pairs], pairs),
        "estimator": "k1",
        "k3_nats": _mean([_row(reverse_kl_k3, a, b) for a, b in pairs]),
    }


def measure_forward_kl(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ReferenceRow],
    temperature: float,
) -> dict[str, Any]:
    """KL(reference ‖ policy) from stored reference outputs, k3 form; no reference model needed."""
    ours = score_responses(
        accelerator,
        policy,
        tokenizer,
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        temperature,
    )
    pairs = [(mine, torch.tensor(row.log_probs)) for mine, row in zip(ours, rows, strict=True)]
    nats = []
    for mine, stored in pairs:
        log_ratio = (mine - stored).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        nats.append(float((log_ratio.exp() - 1 - log_ratio).sum()))
    return {**_estimate(nats, pairs), "estimator": "k3"}


def _row(estimator: Any, ours: Tensor, theirs: Tensor) -> float:
    mask = torch.ones((1, len(ours)), dtype=torch.bool)
    return float(estimator(ours[None], theirs[None], mask))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _estimate(nats: Sequence[float], pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    tokens = sum(len(mine) for mine, _ in pairs)
    values = torch.tensor(nats, dtype=torch.float64)
    error = float(values.std(correction=1) / len(nats) ** 0.5) if len(nats) > 1 else 0.0
    return {
        "nats": float(values.mean()),
        "standard_error": error,
        "per_token": float(values.sum()) / tokens,
        "sequences": len(nats),
    }
