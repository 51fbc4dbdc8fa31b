"""PPO's gradients: clipped policy and value losses on episodes, forward KL on reference rows.

Both belong to the same optimizer step, and so do pretraining texts. Losses are sums divided by the
token counts of all processes, so neither the micro-batch size nor the number of processes changes
the gradient. `policies/ppo/train.py` runs the epochs and takes the optimizer steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from policies.formulas import (
    FORWARD_KL,
    abandoned_tokens,
    approximate_kl,
    clamped_tokens,
    clipped_tokens,
    policy_loss,
    value_loss,
)
from policies.ppo.batches import PaddingMap, equalize_batch_count, split_by_length, trim_padding
from policies.ppo.rollout import Experience
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.tokens import TokenBatch, send
from rlhf.parallel.distributed import global_sum
from rlhf.parallel.sharding import accumulating, backward, is_zero

CLAMPING = ("k3", "token_reverse")  # the estimators whose log-ratios have a limit


@dataclass(frozen=True)
class Learner:
    """What is trained, and how.

    Attributes:
        temperature: that of sampling.
        kl_coefficient: weight of the KL loss; an adaptive one differs from that in the settings.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: Optimizer
    settings: PPOSettings
    temperature: float
    kl_coefficient: float


@dataclass(frozen=True)
class ReferenceBatch:
    """Reference rows for the KL term: sequences (N, ·) and their stored log-probs (N, R).

    Where the store has them, also the K most likely tokens at every place and their log-probs.
    """

    sequences: Sequences
    log_probs: Float[Tensor, "N R"]
    top_ids: Int[Tensor, "N R K"] | None = None
    top_log_probs: Float[Tensor, "N R K"] | None = None


@dataclass(frozen=True)
class StepData:
    """The data of one step: episodes, reference rows for the KL term, pretraining texts."""

    experience: Experience
    references: ReferenceBatch
    texts: Sequences | None = None


@dataclass(frozen=True)
class Minibatch:
    """Indices of the episodes, reference rows and pretraining texts that one pass or step uses."""

    episodes: Tensor
    reference_rows: Tensor
    texts: Tensor


@dataclass
class LossSums:
    """Sums over real tokens: of a micro-batch, with gradients; of more of them, in float64."""

    policy: Tensor
    value: Tensor
    forward_kl: Tensor
    approx_kl: Tensor
    clipped: Tensor
    clamped: Tensor
    abandoned: Tensor
    ptx: Tensor

    @classmethod
    def zero(cls, device: torch.device, dtype: torch.dtype = torch.float32) -> "LossSums":
        """Nothing summed up yet."""
        return cls(
            **{field.name: torch.zeros((), device=device, dtype=dtype) for field in fields(cls)}
        )

    def add(self, other: "LossSums") -> None:
        """Add another's sums, in float64 and without their gradients."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value.detach().double())


@dataclass(frozen=True)
class TokenCounts:
    """Real tokens of all processes that sums are divided by, in float64.

    Attributes:
        responses: of episodes that policy and value losses learn from.
        references: of reference rows.
        texts: of pretraining texts.
    """

    responses: Tensor
    references: Tensor
    texts: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> "TokenCounts":
        """Nothing counted yet."""
        return cls(*torch.zeros(len(fields(cls)), device=device, dtype=torch.float64))

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return TokenCounts(*(mine + theirs for mine, theirs in pairs))


def mean_approx_kl(sums: LossSums, counts: TokenCounts) -> float:
    """½ mean (Δ log-prob)²: how far the policy has moved since the rollout."""
    return float(sums.approx_kl / counts.responses.clamp(min=1))


def step_metrics(sums: LossSums, counts: TokenCounts, settings: PPOSettings) -> dict[str, float]:
    """The metrics of a step's updates: means over real tokens of all processes."""
    responses = counts.responses.clamp(min=1)  # all may have been left out of the losses
    means = {"loss/policy": sums.policy / responses}
    if settings.advantages == "gae":
        means["loss/value"] = sums.value / responses
    if counts.references:
        name, _ = FORWARD_KL[settings.kl.estimator]
        means[name] = sums.forward_kl / counts.references
        if settings.kl.estimator in CLAMPING:
            means["kl/clamped_fraction"] = sums.clamped / counts.references
        means["kl/abandoned_fraction"] = sums.abandoned / counts.references
    if counts.texts:
        means["loss/ptx"] = sums.ptx / counts.texts
    means["approx_kl"] = sums.approx_kl / responses
    means["clip_fraction"] = sums.clipped / responses
    return {name: float(mean) for name, mean in means.items()}


def reference_batch(
    rows: Sequence[ReferenceRow], pad_id: int, device: torch.device
) -> ReferenceBatch:
    """Stack reference rows into tensors."""
    prompts = [row.prompt_ids for row in rows]
    sequences = Sequences.of(prompts, [row.response_ids for row in rows], pad_id)
    log_probs = torch.zeros(sequences.responses.ids.shape)
    for index, row in enumerate(rows):
        log_probs[index, : len(row.log_probs)] = torch.tensor(row.log_probs)
    tops = [row.top for row in rows if row.top is not None]
    if not tops:
        return ReferenceBatch(sequences.to(device), log_probs.to(device))
    kinds = ([torch.tensor(t.ids) for t in tops], [torch.tensor(t.log_probs) for t in tops])
    top = [pad_sequence(kind, batch_first=True).to(device) for kind in kinds]
    return ReferenceBatch(sequences.to(device), log_probs.to(device), top[0].long(), top[1])


def every_minibatch(
    data: StepData, epochs: int, minibatches: int, generator: torch.Generator
) -> Iterator[Minibatch]:
    """The minibatches of all epochs; each epoch is shuffled anew."""
    for _ in range(epochs):
        yield from split_minibatches(
            data.experience.sequences.on_host.responses.mask.sum(dim=1),
            data.references.sequences.on_host.responses.mask.sum(dim=1),
            minibatches,
            generator,
            0 if data.texts is None else len(data.texts.prompts.ids),
        )


def split_minibatches(
    tokens: Int[Tensor, " E"],
    row_tokens: Int[Tensor, " N"],
    minibatches: int,
    generator: torch.Generator,
    texts: int = 0,
) -> list[Minibatch]:
    """Shuffle episodes and reference rows, and split them evenly by tokens; texts keep their order.

    Args:
        tokens: response tokens of the episodes.
        row_tokens: response tokens of the reference rows.
        minibatches: how many; at most as many as there are episodes.
        generator: of the shuffles.
        texts: how many pretraining texts there are.
    """
    minibatches = min(minibatches, len(tokens))
    return [
        Minibatch(*parts)
        for parts in zip(
            _split_evenly(tokens, minibatches, generator),
            _split_evenly(row_tokens, minibatches, generator),
            torch.tensor_split(torch.arange(texts), minibatches),
            strict=True,
        )
    ]


def _split_evenly(
    tokens: Int[Tensor, " N"], parts: int, generator: torch.Generator
) -> list[Tensor]:
    """Split indices into groups of nearly equal size and number of tokens, at random.

    Of every `parts` neighbors in order of length, each group gets one.
    """
    order = torch.randperm(len(tokens), generator=generator)
    owners = torch.empty_like(order)
    for neighbors in tokens[order].argsort(descending=True, stable=True).split(parts):
        owners[neighbors.sort().values] = torch.arange(len(neighbors))
    return [order[owners == part] for part in range(parts)]


def compute_gradients(
    learner: Learner, data: StepData, minibatch: Minibatch
) -> tuple[LossSums, TokenCounts]:
    """Add up the gradients of one optimizer step; the sums of its losses over all processes."""
    accelerator, model, settings = learner.accelerator, learner.model, learner.settings
    counts = _count_tokens(accelerator, data, minibatch)
    sums = LossSums.zero(accelerator.device, torch.float64)
    parts = micro_batches(learner, data, minibatch)
    # one autocast for all micro-batches casts weights once; copies of sharded ones would stay
    is_sharded = is_zero(model) or isinstance(model, FSDPModule)
    with nullcontext() if is_sharded else accelerator.autocast():
        for index, part in enumerate(parts):
            with accumulating(accelerator, model, last=index == len(parts) - 1):
                losses = compute_losses(learner, data, part)
                loss = losses.policy + settings.critic.coefficient * losses.value
                loss = loss / counts.responses.clamp(min=1)
                kl = learner.kl_coefficient * losses.forward_kl
                loss = loss + kl / counts.references.clamp(min=1)
                loss = loss + settings.ptx.coefficient * losses.ptx / counts.texts.clamp(min=1)
                # data parallelism averages gradients over processes, and here they are to be added
                backward(accelerator, model, loss.float() * accelerator.num_processes)
            sums.add(losses)
    return LossSums(*global_sum(accelerator, torch.stack(list(vars(sums).values())))), counts


def _count_tokens(accelerator: Accelerator, data: StepData, minibatch: Minibatch) -> TokenCounts:
    loss_mask = data.experience.loss_mask
    tokens = loss_mask[send(minibatch.episodes, loss_mask.device)].sum()
    references = data.references.sequences.on_host.responses.mask[minibatch.reference_rows].sum()
    texts = torch.tensor(0)
    if data.texts is not None:
        texts = data.texts.on_host.responses.mask[minibatch.texts].sum()
    other_counts = [send(count, tokens.device) for count in (references, texts)]
    counts = global_sum(accelerator, torch.stack([tokens, *other_counts]))
    return TokenCounts(*counts)


def compute_losses(learner: Learner, data: StepData, part: Minibatch) -> LossSums:
    """The losses of one micro-batch: of texts, or of episodes and reference rows."""
    if data.texts is not None and len(part.texts):
        return _text_losses(learner, data.texts.on_host.rows(part.texts))
    return _episode_losses(learner, data, part.episodes, part.reference_rows)


def _text_losses(learner: Learner, texts: Sequences) -> LossSums:
    """Σ −log π over the tokens of pretraining texts, at temperature 1."""
    batch = trim_padding(texts, learner.settings.batch.micro_tokens).to(learner.accelerator.device)
    log_probs, *_ = learner.model(batch, 0, 1.0)
    losses = LossSums.zero(log_probs.device)
    losses.ptx = -log_probs.sum()
    return losses


def _episode_losses(learner: Learner, data: StepData, episodes: Tensor, rows: Tensor) -> LossSums:
    """Policy and value losses of episodes and the forward KL of reference rows, in one forward."""
    experience, references, settings = data.experience, data.references, learner.settings
    device, sizes = learner.accelerator.device, [len(episodes), len(rows)]
    known, stored = experience.sequences.on_host, references.sequences.on_host
    batch = trim_padding(
        concatenate(known.rows(episodes), stored.rows(rows)), settings.batch.micro_tokens
    )
    masks = batch.responses.mask.split(sizes)
    to_batch = PaddingMap.between(known.responses.mask, masks[0], device, episodes)
    to_row_batch = PaddingMap.between(stored.responses.mask, masks[1], device, rows)
    batch = batch.to(device)
    row_mask = to_row_batch.mask
    top_ids, reference = None, references.log_probs
    if settings.kl.estimator == "top_k" and references.top_log_probs is not None:
        top_ids, reference = references.top_ids, references.top_log_probs
    features, weights = experience.critic_features, experience.sampler_weights
    log_probs, values, top = learner.model(
        batch,
        len(episodes),
        learner.temperature,
        None if top_ids is None else to_row_batch(top_ids),
        None if features is None else to_batch(features),
    )
    new_log_probs, row_log_probs = log_probs.split(sizes)
    old_log_probs, loss_mask = to_batch(experience.old_log_probs), to_batch(experience.loss_mask)
    clips = (settings.loss.clip_range, settings.loss.clip_range_high)
    losses = LossSums.zero(device)
    if values is not None:
        losses.value = value_loss(
            values,
            to_batch(experience.old_values),
            to_batch(experience.returns),
            loss_mask,
            settings.critic.clip_range,
        )
    losses.policy = policy_loss(
        new_log_probs,
        old_log_probs,
        to_batch(experience.advantages),
        loss_mask,
        *clips,
        settings.loss.dual_clip,
        None if weights is None else to_batch(weights),
    )
    _, forward_kl = FORWARD_KL[settings.kl.estimator]
    losses.forward_kl = forward_kl(
        row_log_probs if top is None else top, to_row_batch(reference), row_mask
    )
    losses.approx_kl = approximate_kl(new_log_probs.detach(), old_log_probs, loss_mask)
    losses.clipped = clipped_tokens(new_log_probs.detach(), old_log_probs, loss_mask, *clips)
    reference_log_probs = to_row_batch(references.log_probs)
    losses.clamped = clamped_tokens(row_log_probs.detach(), reference_log_probs, row_mask)
    losses.abandoned = abandoned_tokens(row_log_probs.detach(), reference_log_probs, row_mask)
    return losses


def micro_batches(learner: Learner, data: StepData, minibatch: Minibatch) -> list[Minibatch]:
    """Micro-batches of rows of similar length, so that little is spent on padding.

    The critic does not read reference rows or texts. Under a token budget these have micro-batches
    of their own: where weights are sharded, all processes must call the critic in the same ones.
    DDP sums gradients over processes in the last pass only, so that pass must use every weight;
    DeepSpeed sums in every pass and resets its sums in the first.
    """
    batch = learner.settings.batch
    episodes, rows, texts = minibatch.episodes, minibatch.reference_rows, minibatch.texts
    lengths = data.experience.sequences.on_host.joined.mask.sum(dim=1)[episodes]
    row_lengths = data.references.sequences.on_host.joined.mask.sum(dim=1)[rows]

    def split(each: Tensor, size: int = 0) -> list[Tensor]:
        parts = split_by_length(each, size, batch.micro_tokens)
        return equalize_batch_count(learner.accelerator, parts)

    if batch.micro_tokens:
        batches = [Minibatch(episodes[:0], rows[part], texts[:0]) for part in split(row_lengths)]
        batches += [Minibatch(episodes[part], rows[:0], texts[:0]) for part in split(lengths)]
        if is_zero(learner.model):
            batches.reverse()
    else:
        parts = episodes[lengths.argsort()].split(batch.micro_batch_size)
        row_parts = torch.tensor_split(rows[row_lengths.argsort()], len(parts))
        both = zip(parts, row_parts, strict=True)
        batches = [Minibatch(part, row_part, texts[:0]) for part, row_part in both]
    if data.texts is None:
        return batches
    text_lengths = data.texts.on_host.joined.mask.sum(dim=1)[texts]
    with_texts = [
        Minibatch(episodes[:0], rows[:0], texts[part])
        for part in split(text_lengths, batch.micro_batch_size)
    ]
    return [*batches, *with_texts] if is_zero(learner.model) else [*with_texts, *batches]


def concatenate(first: Sequences, second: Sequences) -> Sequences:
    """Rows of both, padded to common widths: prompts on the left, responses on the right."""
    prompts = _concatenate(first.prompts, second.prompts, left=True)
    responses = _concatenate(first.responses, second.responses, left=False)
    return Sequences(prompts, responses)


def _concatenate(first: TokenBatch, second: TokenBatch, *, left: bool) -> TokenBatch:
    width = max(first.ids.shape[1], second.ids.shape[1])

    def widen(tensor: Tensor) -> Tensor:
        missing = width - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing))

    return TokenBatch(
        torch.cat([widen(first.ids), widen(second.ids)]),
        torch.cat([widen(first.mask), widen(second.mask)]),
    )
