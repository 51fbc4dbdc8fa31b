"""PPO's update: clipped policy and value losses on episodes, forward KL on stored rows.

Both belong to the same optimizer step, and so do pretraining texts. Losses are sums divided by the
token counts of all processes, so neither the micro-batch size nor the number of processes changes
the gradient.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from policies.ppo.losses import approximate_kl, clipped_tokens, policy_loss, value_loss
from policies.ppo.micro_batches import arrange, refit, split_alike, split_by_length
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.rollout import Rollout
from policies.ppo.settings import PPOSettings
from policies.reference.kl import (
    abandoned_tokens,
    clamped_tokens,
    forward_kl_k1,
    forward_kl_k3,
    forward_kl_top_k,
    token_reverse_kl,
)
from policies.reference.store import ReferenceRow
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.tokens import TokenBatch, pad_left, pad_right
from rlhf.parallel.distributed import global_sum
from rlhf.parallel.sharding import accumulating, backward, clip_gradients, is_zero, unwrap

KL_ESTIMATORS = {
    "k3": ("kl/forward_k3_per_token", forward_kl_k3),
    "k1": ("kl/forward_k1_per_token", forward_kl_k1),
    "top_k": ("kl/forward_top_k_per_token", forward_kl_top_k),
    "token_reverse": ("kl/token_reverse_per_token", token_reverse_kl),
}
CLAMPING = ("k3", "token_reverse")  # the estimators whose log-ratios have a limit
LOSSES = ("policy", "value", "forward_kl", "approx_kl", "clipped", "clamped", "abandoned", "ptx")
COUNTS = ("tokens", "reference_tokens", "ptx_tokens")


@dataclass(frozen=True)
class ReferenceBatch:
    """Stored rows for the KL term: sequences (N, ·) and their stored log-probs (N, R).

    Where the store has them, also the K likeliest tokens at every place and their log-probs.
    """

    sequences: Sequences
    log_probs: Float[Tensor, "N R"]
    top_ids: Int[Tensor, "N R K"] | None = None
    top_log_probs: Float[Tensor, "N R K"] | None = None


@dataclass(frozen=True)
class Minibatch:
    """Which episodes, stored rows and pretraining texts one optimizer step uses."""

    episodes: Tensor
    reference_rows: Tensor
    texts: Tensor


def reference_batch(
    rows: Sequence[ReferenceRow], pad_id: int, device: torch.device
) -> ReferenceBatch:
    """Stack stored rows into tensors."""
    responses = pad_right([row.response_ids for row in rows], pad_id)
    log_probs = torch.zeros(responses.ids.shape)
    for index, row in enumerate(rows):
        log_probs[index, : len(row.log_probs)] = torch.tensor(row.log_probs)
    sequences = Sequences(pad_left([row.prompt_ids for row in rows], pad_id), responses)
    tops = [row.top for row in rows if row.top is not None]
    if not tops:
        return ReferenceBatch(sequences.to(device), log_probs.to(device))
    kinds = ([torch.tensor(t.ids) for t in tops], [torch.tensor(t.log_probs) for t in tops])
    top = [torch.nn.utils.rnn.pad_sequence(kind, batch_first=True).to(device) for kind in kinds]
    return ReferenceBatch(sequences.to(device), log_probs.to(device), top[0].long(), top[1])


def split_minibatches(
    tokens: Int[Tensor, " E"],
    row_tokens: Int[Tensor, " N"],
    minibatches: int,
    generator: torch.Generator,
    texts: int = 0,
) -> list[Minibatch]:
    """Shuffle episodes and stored rows and deal them out by tokens; texts come in a random order.

    Args:
        tokens: response tokens of the episodes.
        row_tokens: response tokens of the stored rows.
        minibatches: how many; at most as many as there are episodes.
        generator: of the shuffles.
        texts: how many pretraining texts there are.
    """
    minibatches = min(minibatches, len(tokens))
    return [
        Minibatch(*parts)
        for parts in zip(
            _deal(tokens, minibatches, generator),
            _deal(row_tokens, minibatches, generator),
            torch.tensor_split(torch.arange(texts), minibatches),
            strict=True,
        )
    ]


def _deal(tokens: Int[Tensor, " N"], parts: int, generator: torch.Generator) -> list[Tensor]:
    """Places in parts of one size (or one less), whose tokens differ by the longest at most.

    Of `parts` neighbours in length every part gets one, by chance.
    """
    order = torch.randperm(len(tokens), generator=generator)
    owners = torch.empty_like(order)
    for neighbours in tokens[order].argsort(descending=True, stable=True).split(parts):
        owners[neighbours.sort().values] = torch.arange(len(neighbours))
    return [order[owners == part] for part in range(parts)]


def update(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Optimizer,
    rollout: Rollout,
    references: ReferenceBatch,
    settings: PPOSettings,
    temperature: float,
    generator: torch.Generator,
    texts: Sequences | None = None,
) -> dict[str, float]:
    """Run the epochs of one step and return means over all real tokens of all processes.

    Stops early when approx-KL exceeds `max_approx_kl`; `updates` counts the optimizer steps taken.
    """
    sums = torch.zeros(len(LOSSES) + len(COUNTS), dtype=torch.float64)
    num_texts = 0 if texts is None else len(texts.prompts.ids)
    norms = {f"grad_norm/{name}": 0.0 for name in unwrap(model).parts}
    updates = 0
    for _ in range(settings.optim.epochs):
        for minibatch in split_minibatches(
            rollout.response_mask.sum(dim=1).cpu(),
            references.sequences.responses.mask.sum(dim=1).cpu(),
            settings.optim.minibatches,
            generator,
            num_texts,
        ):
            chosen = texts.rows(minibatch.texts) if texts else None
            added = _accumulate(
                accelerator, model, rollout, references, minibatch, chosen, settings, temperature
            )
            sums += added
            approx_kl = float(added[LOSSES.index("approx_kl")] / added[len(LOSSES)].clamp(min=1))
            if approx_kl > settings.optim.target_kl:
                optimizer.zero_grad()
                return _means(sums, norms, updates, settings)
            plain: PolicyAndCritic = unwrap(model)
            for name, part in plain.parts.items():
                norms[f"grad_norm/{name}"] = clip_gradients(
                    accelerator, model, part.parameters(), settings.optim.max_grad_norm
                )
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return _means(sums, norms, updates, settings)


def _means(
    sums: Tensor, norms: dict[str, float], updates: int, settings: PPOSettings
) -> dict[str, float]:
    total = dict(zip((*LOSSES, *COUNTS), sums.tolist(), strict=True))
    tokens = max(total["tokens"], 1)  # all responses may have been left out of the losses
    means = {"loss/policy": total["policy"] / tokens}
    if settings.has_critic:
        means["loss/value"] = total["value"] / tokens
    if total["reference_tokens"]:
        name = KL_ESTIMATORS[settings.kl.estimator][0]
        means[name] = total["forward_kl"] / total["reference_tokens"]
        if settings.kl.estimator in CLAMPING:
            means["kl/clamped_fraction"] = total["clamped"] / total["reference_tokens"]
        means["kl/abandoned_fraction"] = total["abandoned"] / total["reference_tokens"]
    if total["ptx_tokens"]:
        means["loss/ptx"] = total["ptx"] / total["ptx_tokens"]
    return means | {
        "approx_kl": total["approx_kl"] / tokens,
        "clip_fraction": total["clipped"] / tokens,
        "updates": updates,
        **norms,
    }


def _accumulate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    rollout: Rollout,
    references: ReferenceBatch,
    minibatch: Minibatch,
    texts: Sequences | None,
    settings: PPOSettings,
    temperature: float,
) -> Tensor:
    """Add up the gradients of one optimizer step; global sums of LOSSES, and COUNTS."""
    tokens = rollout.loss_mask[minibatch.episodes].sum()
    reference_tokens = references.sequences.responses.mask[minibatch.reference_rows].sum()
    text_tokens = torch.zeros_like(tokens) if texts is None else texts.responses.mask.sum()
    counts = global_sum(accelerator, torch.stack([tokens, reference_tokens, text_tokens]))
    sums = torch.zeros(len(LOSSES), dtype=torch.float64, device=accelerator.device)
    parts = [
        partial(_losses, model, rollout, references, episodes, rows, settings, temperature)
        for episodes, rows in _micro_batches(
            accelerator, model, rollout, references, minibatch, settings
        )
    ]
    text_parts = _text_parts(accelerator, model, texts, settings)
    parts = [*parts, *text_parts] if is_zero(model) else [*text_parts, *parts]
    # one autocast around all micro-batches casts the weights once; where they are divided, such
    # copies would stay in memory
    divided = is_zero(model) or isinstance(model, FSDPModule)
    with nullcontext() if divided else accelerator.autocast():
        for position, losses_of in enumerate(parts):
            with accumulating(accelerator, model, last=position == len(parts) - 1):
                losses = losses_of()
                loss = losses[0] + settings.critic.coefficient * losses[1]
                loss = loss / counts[0].clamp(min=1)
                loss = loss + settings.kl.coefficient * losses[2] / counts[1].clamp(min=1)
                loss = loss + settings.ptx.coefficient * losses[-1] / counts[2].clamp(min=1)
                # data parallelism averages gradients over processes; the sums want their total
                backward(accelerator, model, loss.float() * accelerator.num_processes)
            sums += torch.stack(losses).detach().double()
    return torch.cat([global_sum(accelerator, sums), counts]).cpu()


def _text_parts(
    accelerator: Accelerator,
    model: torch.nn.Module,
    texts: Sequences | None,
    settings: PPOSettings,
) -> list[partial[list[Tensor]]]:
    if texts is None:
        return []
    lengths = texts.joined.mask.sum(dim=1).cpu()
    parts = split_by_length(lengths, settings.batch.micro_batch_size, settings.batch.micro_tokens)
    return [
        partial(_text_losses, model, arrange(texts.rows(rows), settings.batch.micro_tokens))
        for rows in split_alike(accelerator, parts)
    ]


def _text_losses(model: torch.nn.Module, texts: Sequences) -> list[Float[Tensor, ""]]:
    """LOSSES of pretraining texts: Σ −log π over their tokens, at temperature 1."""
    log_probs, *_ = model(texts, 0, 1.0)
    zero = torch.zeros((), device=log_probs.device)
    return [zero] * (len(LOSSES) - 1) + [-log_probs.sum()]


def _micro_batches(
    accelerator: Accelerator,
    model: torch.nn.Module,
    rollout: Rollout,
    references: ReferenceBatch,
    minibatch: Minibatch,
    settings: PPOSettings,
) -> list[tuple[Tensor, Tensor]]:
    """Deal rows of like length into micro-batches, so that little is spent on padding.

    Stored rows, like texts, do not reach the critic. Under a token budget they have micro-batches
    of their own: where weights are divided, all processes must call the critic in the same ones.
    DDP sums gradients over processes in the last pass only, so that pass must use every weight;
    DeepSpeed sums in every pass and resets its sums in the first.
    """
    episodes, rows = minibatch.episodes, minibatch.reference_rows
    lengths = rollout.sequences.joined.mask.sum(dim=1).cpu()[episodes]
    row_lengths = references.sequences.joined.mask.sum(dim=1).cpu()[rows]
    if not settings.batch.micro_tokens:
        parts = episodes[lengths.argsort()].split(settings.batch.micro_batch_size)
        row_parts = torch.tensor_split(rows[row_lengths.argsort()], len(parts))
        return list(zip(parts, row_parts, strict=True))

    def split(each: Tensor) -> list[Tensor]:
        return split_alike(accelerator, split_by_length(each, 0, settings.batch.micro_tokens))

    pairs = [(episodes[:0], rows[part]) for part in split(row_lengths)]
    pairs += [(episodes[part], rows[:0]) for part in split(lengths)]
    return pairs[::-1] if is_zero(model) else pairs


def _losses(
    model: torch.nn.Module,
    rollout: Rollout,
    references: ReferenceBatch,
    episodes: Tensor,
    rows: Tensor,
    settings: PPOSettings,
    temperature: float,
) -> list[Float[Tensor, ""]]:
    """LOSSES of one micro-batch of episodes and stored rows, each a sum over real tokens."""
    batch = arrange(
        stack(rollout.sequences.rows(episodes), references.sequences.rows(rows)),
        settings.batch.micro_tokens,
    )
    mask, row_mask = batch.responses.mask.split([len(episodes), len(rows)])

    def fit_row(tensor: Tensor) -> Tensor:
        return refit(tensor[rows], references.sequences.responses.mask[rows], row_mask)

    top_ids, reference = None, references.log_probs
    if settings.kl.estimator == "top_k" and references.top_log_probs is not None:
        top_ids, reference = references.top_ids, references.top_log_probs

    def fit(tensor: Tensor) -> Tensor:
        return refit(tensor[episodes], rollout.response_mask[episodes], mask)

    log_probs, values, top = model(
        batch,
        len(episodes),
        temperature,
        None if top_ids is None else fit_row(top_ids),
        None if rollout.critic_features is None else fit(rollout.critic_features),
    )
    learned = fit(rollout.loss_mask)
    value = torch.zeros((), device=mask.device)
    if values is not None:
        value = value_loss(
            values,
            fit(rollout.old_values),
            fit(rollout.returns),
            learned,
            settings.critic.clip_range,
        )
    mine, stored = log_probs[: len(episodes)], log_probs[len(episodes) :]
    old = fit(rollout.old_log_probs)
    clips = (settings.loss.clip_range, settings.loss.clip_range_high)
    weights = None if rollout.sampler_weights is None else fit(rollout.sampler_weights)
    advantages = fit(rollout.advantages)
    return [
        policy_loss(mine, old, advantages, learned, *clips, settings.loss.dual_clip, weights),
        value,
        KL_ESTIMATORS[settings.kl.estimator][1](
            stored if top is None else top, fit_row(reference), row_mask
        ),
        approximate_kl(mine.detach(), old, learned),
        clipped_tokens(mine.detach(), old, learned, *clips),
        clamped_tokens(stored.detach(), fit_row(references.log_probs), row_mask),
        abandoned_tokens(stored.detach(), fit_row(references.log_probs), row_mask),
        torch.zeros_like(value),
    ]


def stack(first: Sequences, second: Sequences) -> Sequences:
    """Rows of both, padded to common widths: prompts on the left, responses on the right."""
    prompts = _stack(first.prompts, second.prompts, left=True)
    responses = _stack(first.responses, second.responses, left=False)
    return Sequences(prompts, responses)


def _stack(first: TokenBatch, second: TokenBatch, *, left: bool) -> TokenBatch:
    width = max(first.ids.shape[1], second.ids.shape[1])

    def widen(tensor: Tensor) -> Tensor:
        missing = width - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing))

    return TokenBatch(
        torch.cat([widen(first.ids), widen(second.ids)]),
        torch.cat([widen(first.mask), widen(second.mask)]),
    )
