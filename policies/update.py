"""PPO's update: clipped policy and value losses on episodes, forward KL on stored rows.

Both belong to the same optimizer step. Losses are sums divided by the token counts of all
processes, so neither the micro-batch size nor the number of processes changes the gradient.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from policies.actor_critic import PolicyAndCritic
from policies.log_probs import Sequences
from policies.losses import (
    approximate_kl,
    clipped_tokens,
    forward_kl_k1,
    forward_kl_k3,
    policy_loss,
    token_reverse_kl,
    value_loss,
)
from policies.reference_store import ReferenceRow
from policies.rollout import Rollout
from policies.settings import PPOSettings
from rlhf.distributed import global_sum
from rlhf.sharding import accumulating, backward, clip_gradients, is_zero, unwrap
from rlhf.tokens import TokenBatch, pad_left, pad_right

KL_ESTIMATORS = {
    "k3": ("kl/forward_k3_per_token", forward_kl_k3),
    "k1": ("kl/forward_k1_per_token", forward_kl_k1),
    "token_reverse": ("kl/token_reverse_per_token", token_reverse_kl),
}
STATISTICS = ("policy_loss", "value_loss", "forward_kl", "approx_kl", "clipped")


@dataclass(frozen=True)
class ReferenceBatch:
    """Stored rows for the KL term: sequences (N, ·) and their stored log-probs (N, R)."""

    sequences: Sequences
    log_probs: Float[Tensor, "N R"]


@dataclass(frozen=True)
class Minibatch:
    """Which episodes and which stored rows one optimizer step uses."""

    episodes: Tensor
    reference_rows: Tensor


def reference_batch(
    rows: Sequence[ReferenceRow], pad_id: int, device: torch.device
) -> ReferenceBatch:
    """Stack stored rows into tensors."""
    responses = pad_right([row.response_ids for row in rows], pad_id)
    log_probs = torch.zeros(responses.ids.shape)
    for index, row in enumerate(rows):
        log_probs[index, : len(row.log_probs)] = torch.tensor(row.log_probs)
    sequences = Sequences(pad_left([row.prompt_ids for row in rows], pad_id), responses)
    return ReferenceBatch(sequences.to(device), log_probs.to(device))


def split_minibatches(
    episodes: int, reference_rows: int, minibatches: int, generator: torch.Generator
) -> list[Minibatch]:
    """Shuffle episodes and stored rows and deal them out evenly."""
    episode_order = torch.randperm(episodes, generator=generator).chunk(minibatches)
    row_order = torch.randperm(reference_rows, generator=generator)
    row_parts = torch.tensor_split(row_order, len(episode_order))
    return [Minibatch(e, r) for e, r in zip(episode_order, row_parts, strict=True)]


def update(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Optimizer,
    rollout: Rollout,
    references: ReferenceBatch,
    settings: PPOSettings,
    temperature: float,
    generator: torch.Generator,
) -> dict[str, float]:
    """Run the epochs of one step and return means over all real tokens of all processes.

    Stops early when approx-KL exceeds `max_approx_kl`; `updates` counts the optimizer steps taken.
    """
    sums = torch.zeros(len(STATISTICS) + 2, dtype=torch.float64)
    norms = {f"grad_norm/{name}": 0.0 for name in unwrap(model).parts}
    updates = 0
    for _ in range(settings.epochs):
        for minibatch in split_minibatches(
            len(rollout.scores), len(references.log_probs), settings.minibatches, generator
        ):
            added = _accumulate(
                accelerator, model, rollout, references, minibatch, settings, temperature
            )
            sums += added
            approx_kl = float(added[3] / added[5])
            if approx_kl > settings.max_approx_kl:
                optimizer.zero_grad()
                return _means(sums, norms, updates, settings)
            plain: PolicyAndCritic = unwrap(model)
            for name, part in plain.parts.items():
                norms[f"grad_norm/{name}"] = clip_gradients(
                    accelerator, model, part.parameters(), settings.max_grad_norm
                )
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return _means(sums, norms, updates, settings)


def _means(
    sums: Tensor, norms: dict[str, float], updates: int, settings: PPOSettings
) -> dict[str, float]:
    tokens, reference_tokens = float(sums[5]), float(sums[6])
    means = {"loss/policy": float(sums[0]) / tokens}
    if settings.has_critic:
        means["loss/value"] = float(sums[1]) / tokens
    if reference_tokens:
        means[KL_ESTIMATORS[settings.kl.estimator][0]] = float(sums[2]) / reference_tokens
    return means | {
        "approx_kl": float(sums[3]) / tokens,
        "clip_fraction": float(sums[4]) / tokens,
        "updates": updates,
        **norms,
    }


def _accumulate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    rollout: Rollout,
    references: ReferenceBatch,
    minibatch: Minibatch,
    settings: PPOSettings,
    temperature: float,
) -> Tensor:
    """Add up the gradients of one optimizer step; global sums of STATISTICS and token counts."""
    tokens = rollout.response_mask[minibatch.episodes].sum()
    reference_tokens = references.sequences.responses.mask[minibatch.reference_rows].sum()
    counts = global_sum(accelerator, torch.stack([tokens, reference_tokens]))
    sums = torch.zeros(len(STATISTICS), dtype=torch.float64, device=accelerator.device)
    micro_batches = _micro_batches(rollout, references, minibatch, settings.micro_batch_size)
    # one autocast around all micro-batches casts the weights once; where they are divided, such
    # copies would stay in memory
    divided = is_zero(model) or isinstance(model, FSDPModule)
    with nullcontext() if divided else accelerator.autocast():
        for position, (episodes, rows) in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            with accumulating(accelerator, model, last=last):
                losses = _losses(model, rollout, references, episodes, rows, settings, temperature)
                loss = (losses[0] + settings.value_coefficient * losses[1]) / counts[0]
                loss = loss + settings.kl.coefficient * losses[2] / counts[1].clamp(min=1)
                # data parallelism averages gradients over processes; the sums want their total
                backward(accelerator, model, loss.float() * accelerator.num_processes)
            sums += torch.stack(losses).detach().double()
    return torch.cat([global_sum(accelerator, sums), counts]).cpu()


def _micro_batches(
    rollout: Rollout, references: ReferenceBatch, minibatch: Minibatch, size: int
) -> list[tuple[Tensor, Tensor]]:
    """Deal rows of like length into micro-batches, so that little is spent on padding."""
    lengths = rollout.sequences.joined.mask.sum(dim=1).cpu()[minibatch.episodes]
    episodes = minibatch.episodes[lengths.argsort()].split(size)
    row_lengths = references.sequences.joined.mask.sum(dim=1).cpu()[minibatch.reference_rows]
    rows = torch.tensor_split(minibatch.reference_rows[row_lengths.argsort()], len(episodes))
    return list(zip(episodes, rows, strict=True))


def _losses(
    model: torch.nn.Module,
    rollout: Rollout,
    references: ReferenceBatch,
    episodes: Tensor,
    rows: Tensor,
    settings: PPOSettings,
    temperature: float,
) -> list[Float[Tensor, ""]]:
    """STATISTICS of one micro-batch, each a sum over real tokens."""
    batch = stack(rollout.sequences.rows(episodes), references.sequences.rows(rows))
    log_probs, values = model(batch, len(episodes), temperature)
    mask = batch.responses.mask[: len(episodes)]
    width = mask.shape[1]
    value = torch.zeros((), device=mask.device)

    def fit(tensor: Tensor) -> Tensor:
        return _to_width(tensor, width)

    if values is not None:
        value = value_loss(
            values,
            fit(rollout.old_values[episodes]),
            fit(rollout.returns[episodes]),
            mask,
            settings.value_clip_range,
        )
    mine, stored = log_probs[: len(episodes)], log_probs[len(episodes) :]
    old = fit(rollout.old_log_probs[episodes])
    return [
        policy_loss(mine, old, fit(rollout.advantages[episodes]), mask, settings.clip_range),
        value,
        KL_ESTIMATORS[settings.kl.estimator][1](
            stored, fit(references.log_probs[rows]), batch.responses.mask[len(episodes) :]
        ),
        approximate_kl(mine.detach(), old, mask),
        clipped_tokens(mine.detach(), old, mask, settings.clip_range),
    ]


def stack(first: Sequences, second: Sequences) -> Sequences:
    """Rows of both, padded to common widths: prompts on the left, responses on the right."""
    prompts = _stack(first.prompts, second.prompts, left=True)
    responses = _stack(first.responses, second.responses, left=False)
    return Sequences(prompts, responses).trimmed()


def _stack(first: TokenBatch, second: TokenBatch, *, left: bool) -> TokenBatch:
    width = max(first.ids.shape[1], second.ids.shape[1])

    def widen(tensor: Tensor) -> Tensor:
        missing = width - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing))

    return TokenBatch(
        torch.cat([widen(first.ids), widen(second.ids)]),
        torch.cat([widen(first.mask), widen(second.mask)]),
    )


def _to_width(tensor: Float[Tensor, "B R"], width: int) -> Float[Tensor, "B W"]:
    """Cut or zero-pad the columns; what is cut is padding."""
    missing = width - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing > 0 else tensor[:, :width]
