"""True KLs of a policy: forward on reference outputs, reverse with the reference loaded.

The reverse KL of a policy's own samples cannot come from a store; it needs the reference's
log-probs of fresh samples. Training with `--kl.source reference` has no reference model in memory;
this audit loads it, unless the policy without its adapters is the reference.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.formulas import (
    abandoned_tokens,
    clamped_tokens,
    forward_kl_k3,
    reverse_kl_k1,
    reverse_kl_k3,
)
from policies.reference.loading import load_reference_model
from policies.reference.store import ReferenceRow, ReferenceStore
from rlhf.modeling.adapters import without_adapters
from rlhf.modeling.log_probs import (
    SCORE_BATCH,
    Sequences,
    batches_by_prompt,
    response_log_probs,
)
from rlhf.modeling.models import in_memory
from rlhf.parallel.sharding import Sharding


@torch.no_grad()
def score_responses(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    temperature: float,
    batch_size: int = SCORE_BATCH,
) -> list[Tensor]:
    """Log-probs of every response token, one tensor per response, in the order given."""
    pad_id = int(tokenizer.pad_token_id)
    scored: dict[int, Tensor] = {}
    lengths = [len(ids) for ids in responses]
    for rows in batches_by_prompt(prompts, lengths, min(batch_size, SCORE_BATCH)):
        mine = [prompts[row] for row in rows], [responses[row] for row in rows]
        sequences = Sequences.of(*mine, pad_id).to(accelerator.device)
        with accelerator.autocast():
            token_log_probs = response_log_probs(model, sequences, temperature)
        log_probs = token_log_probs.first(sequences.responses.mask).cpu()
        scored |= {row: log_probs[i, : len(responses[row])] for i, row in enumerate(rows)}
    return [scored[row] for row in range(len(responses))]


def score_rows(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ReferenceRow],
    temperature: float,
    batch_size: int = SCORE_BATCH,
) -> list[Tensor]:
    """`score_responses` of reference outputs."""
    prompts, responses = [row.prompt_ids for row in rows], [row.response_ids for row in rows]
    return score_responses(
        accelerator, model, tokenizer, prompts, responses, temperature, batch_size
    )


def estimate_reverse_kl(
    prompts: Sequence[list[int]], ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> dict[str, Any]:
    """KL(policy ‖ reference) from both models' log-probs of the policy's own samples.

    Args:
        prompts: of each sample; a prompt's samples share an error, see `estimate`.
        ours: the policy's log-probs, a tensor of tokens for each sample.
        theirs: the reference's.
    """
    pairs = list(zip(ours, theirs, strict=True))
    nats = [_sum(reverse_kl_k1, *pair) for pair in pairs]
    return {
        **estimate(nats, [len(mine) for mine in ours], [str(ids) for ids in prompts]),
        "estimator": "k1",
        "k3_nats": statistics.fmean(_sum(reverse_kl_k3, *pair) for pair in pairs),
    }


@dataclass(frozen=True)
class AuditSamples:
    """A policy's responses, its log-probs of them, and its forward KL on the reference outputs.

    Attributes:
        prompts: token ids, one list for each response.
        responses: token ids of the responses.
        log_probs: the policy's, a tensor of tokens for each response.
        reference_log_probs: the reference's, if it is the policy without adapters.
        forward: the forward KL on the reference outputs.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[Tensor]
    reference_log_probs: list[Tensor] | None
    forward: dict[str, Any]


def measure_for_audit(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    store: ReferenceStore,
    groups: Sequence[tuple[ReferenceRow, ...]],
    responses: list[list[int]],
    *,
    holds_reference: bool = False,
) -> AuditSamples:
    """Everything an audit needs from the policy itself.

    Args:
        accelerator: device and precision.
        policy: the trained policy.
        tokenizer: for padding.
        store: the reference outputs.
        groups: the reference rows of each prompt.
        responses: token ids of the policy's fresh response to each prompt.
        holds_reference: the policy is the reference when its adapters are switched off; then the
            reference's log-probs are measured, too.
    """
    prompts = [group[0].prompt_ids for group in groups]
    temperature = store.sampling.temperature

    def score() -> list[Tensor]:
        return score_responses(accelerator, policy, tokenizer, prompts, responses, temperature)

    log_probs, reference_log_probs = score(), None
    if holds_reference:
        with without_adapters(policy):
            reference_log_probs = score()
    rows = [row for group in groups for row in group]
    forward = measure_forward_kl(accelerator, policy, tokenizer, rows, temperature)
    return AuditSamples(prompts, responses, log_probs, reference_log_probs, forward)


def audit_policy(
    accelerator: Accelerator,
    samples: AuditSamples,
    tokenizer: PreTrainedTokenizerBase,
    store: ReferenceStore,
    sharding: Sharding,
) -> dict[str, Any]:
    """Both KLs; the reference model is loaded where the policy does not hold it."""
    theirs = samples.reference_log_probs
    source = "the policy's adapters switched off"
    if theirs is None:
        source = "the reference model loaded"
        with in_memory(load_reference_model(store, accelerator, sharding)) as reference:
            theirs = score_responses(
                accelerator,
                reference,
                tokenizer,
                samples.prompts,
                samples.responses,
                store.sampling.temperature,
            )
    return {
        "forward": samples.forward,
        "reverse": {
            **estimate_reverse_kl(samples.prompts, samples.log_probs, theirs),
            "audit": f"measured after training with {source}",
        },
    }


def measure_forward_kl(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ReferenceRow],
    temperature: float,
    batch_size: int = SCORE_BATCH,
) -> dict[str, Any]:
    """KL(reference ‖ policy) from reference outputs, k3 form; no reference model needed.

    `clamped_fraction` is the fraction of tokens at which k3 clamps log r (> 10): there the KL is
    larger. `abandoned_fraction` is the fraction with log r < −10, which counts in full.
    """
    ours = score_rows(accelerator, policy, tokenizer, rows, temperature, batch_size)
    pairs = [(mine, torch.tensor(row.log_probs)) for mine, row in zip(ours, rows, strict=True)]
    nats = [_sum(forward_kl_k3, *pair) for pair in pairs]
    lengths = [len(mine) for mine in ours]
    groups = [row.prompt.id for row in rows]
    return {
        **estimate(nats, lengths, groups),
        "estimator": "k3",
        "clamped_fraction": sum(_sum(clamped_tokens, *pair) for pair in pairs) / sum(lengths),
        "abandoned_fraction": sum(_sum(abandoned_tokens, *pair) for pair in pairs) / sum(lengths),
    }


def estimate(
    nats: Sequence[float], lengths: Sequence[int], groups: Sequence[str]
) -> dict[str, Any]:
    """Mean KL per sequence and per token, with the standard error of the first.

    Args:
        nats: one estimate per sequence.
        lengths: tokens of each sequence.
        groups: the prompt of each sequence; responses to one prompt resemble each other, so the
            error is that of the prompts' means. None where there is a single prompt.
    """
    by_prompt: dict[str, list[float]] = {}
    for group, value in zip(groups, nats, strict=True):
        by_prompt.setdefault(group, []).append(value)
    means = [statistics.fmean(values) for values in by_prompt.values()]
    several = len(means) > 1
    return {
        "nats": statistics.fmean(nats),
        "standard_error": statistics.stdev(means) / len(means) ** 0.5 if several else None,
        "per_token": sum(nats) / sum(lengths),
        "sequences": len(nats),
    }


def _sum(estimator: Callable[..., Tensor], mine: Tensor, theirs: Tensor) -> float:
    everything = torch.ones((1, len(mine)), dtype=torch.bool)
    return float(estimator(mine[None], theirs[None], everything))
