"""Where the KL term gets its reference from, how strong it is, and the audit of the true one.

reference   forward KL on reference outputs, a loss in addition to the clip loss (update.py)
adapter     reverse KL on the policy's own samples, the reference being the policy with its LoRA
            adapter switched off; each token's k1 estimate is subtracted from its reward
resident    the same with a frozen copy of the original model in memory
none        no KL term
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from policies.formulas import reverse_kl_k1, reverse_kl_k3
from policies.ppo.batches import in_length_order
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import MAX_RELATIVE_ERROR, PPOSettings
from policies.reference.loading import load_reference_model
from policies.reference.store import ReferenceStore
from rlhf.errors import InputError
from rlhf.modeling.adapters import without_adapters
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.tokens import send
from rlhf.parallel.distributed import global_sum_dict
from rlhf.parallel.sharding import Sharding

ReferencePolicy = Callable[[PolicyAndCritic, Sequences], Float[Tensor, "B R"]]


def reference_policy(
    source: str, store: ReferenceStore, accelerator: Accelerator, sharding: Sharding
) -> ReferencePolicy | None:
    """The source of the reference's log-probs of fresh samples; None where nothing in memory is.

    A resident model is sharded as asked.

    Raises:
        InputError: the resident model is not where the store says, or has changed.
    """
    if source not in ("adapter", "resident"):
        return None
    resident: PreTrainedModel | None = None
    if source == "resident":
        resident = load_reference_model(store, accelerator, sharding)
    temperature = store.sampling.temperature

    def score(model: PolicyAndCritic, sequences: Sequences) -> Tensor:
        policy: Any = model.policy
        with without_adapters(policy) if resident is None else nullcontext():
            token_log_probs = response_log_probs(resident or policy, sequences, temperature)
        return token_log_probs.first(sequences.responses.mask)

    return score


def require_top_k(store: ReferenceStore, kl: KLSettings) -> None:
    """Refuse the exact forward KL of a store that has only the log-probs of its own tokens.

    Raises:
        InputError: says how to make one that has more.
    """
    if kl.source == "reference" and kl.estimator == "top_k" and not store.manifest["stored_top_k"]:
        raise InputError(
            f"--kl.estimator top_k needs the most likely tokens at every place, and {store.folder} "
            "has none",
            "Make the store with rlhf reference --store-top-k 32, or use --kl.estimator k3.",
        )


def adjust(coefficient: float, measured: float, episodes: int, kl: KLSettings) -> float:
    """β ← β (1 + clip(KL/target − 1, ±.2) · n/horizon) (Ziegler et al., arXiv 1909.08593, eq. 3).

    Args:
        coefficient: β.
        measured: the KL, in nats per token.
        episodes: n, responses sampled since the last adjustment.
        kl: target and horizon; without a target β stays.
    """
    if kl.target is None:
        return coefficient
    error = min(max(measured / kl.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1 + error * episodes / kl.horizon)


def reverse_kl_metrics(
    accelerator: Accelerator,
    log_probs: Float[Tensor, "B R"],
    reference_log_probs: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    prefix: str = "kl",
) -> dict[str, float]:
    """KL(policy ‖ reference) of fresh samples of all processes, in nats per token and response."""
    local: dict[str, Tensor | float] = {
        "k1": reverse_kl_k1(log_probs, reference_log_probs, mask).sum(),
        "k3": reverse_kl_k3(log_probs, reference_log_probs, mask).sum(),
        "tokens": mask.sum(),
        "responses": len(mask),
    }
    sums = global_sum_dict(accelerator, local)
    return {
        f"{prefix}/reverse_k1_per_token": sums["k1"] / sums["tokens"],
        f"{prefix}/reverse_k3_per_token": sums["k3"] / sums["tokens"],
        f"{prefix}/reverse_k1": sums["k1"] / sums["responses"],
    }


@torch.no_grad()
def audit(
    accelerator: Accelerator,
    store: ReferenceStore,
    model: PolicyAndCritic,
    sequences: Sequences,
    log_probs: Float[Tensor, "B R"],
    settings: PPOSettings,
    sharding: Sharding,
) -> dict[str, float]:
    """The true reverse KL of a step's samples; loads the original model and frees it afterwards.

    If the policy is that model with adapters, they are switched off instead.
    """
    source = "adapter" if settings.holds_reference else "resident"
    score = reference_policy(source, store, accelerator, sharding)
    assert score is not None
    size = settings.batch.micro_batch_size
    reference = measure_reference(accelerator, model, score, sequences, size, sharding)
    del score
    if sharding.shards_weights:
        gc.collect()  # FSDP's modules and their hooks refer to each other
    mask = sequences.responses.mask
    return reverse_kl_metrics(accelerator, log_probs, reference, mask, "kl_audit")


@torch.no_grad()
def measure_reference(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    score: ReferencePolicy,
    sequences: Sequences,
    micro_batch_size: int,
    sharding: Sharding,
) -> Float[Tensor, "B R"]:
    """The reference's log-probs of fresh samples, in batches of similar length; 0 at padding."""
    log_probs = torch.zeros(sequences.responses.ids.shape, device=accelerator.device)
    parts = list(in_length_order(sequences, micro_batch_size))
    with accelerator.autocast():
        for (rows, part), _ in sharding.equal_calls(accelerator, parts):
            here = send(rows, accelerator.device)
            batch_log_probs = score(model, part.to(accelerator.device))
            log_probs[here, : batch_log_probs.shape[1]] = batch_log_probs
    return log_probs
