"""Log-probabilities of responses: the same function for the reference, rollouts and updates.

Letters: B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf.modeling.attention.packing import pack_if_shorter
from rlhf.modeling.projection import float32_logits
from rlhf.modeling.tokens import TokenBatch, join, pad_left, pad_right

TEMPERATURE_EPSILON = 1e-7

VOCABULARY_CHUNK = 1024  # tokens whose logits are float32 at one time
SCORE_BATCH = 32  # sequences whose log-probs are computed at once, at most


@dataclass(frozen=True)
class Sequences:
    """Left-padded prompts (B, P) and right-padded responses (B, R).

    `real` marks the real tokens of both side by side where the two masks do not: see `end_aligned`.
    """

    prompts: TokenBatch
    responses: TokenBatch
    real: Bool[Tensor, "B T"] | None = None

    @classmethod
    def of(
        cls, prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_id: int
    ) -> "Sequences":
        """Token ids of prompts and their responses, padded."""
        return cls(pad_left(prompts, pad_id), pad_right(responses, pad_id))

    @property
    def joined(self) -> TokenBatch:
        """Prompts and responses side by side, (B, P + R)."""
        joined = join(self.prompts, self.responses)
        return joined if self.real is None else TokenBatch(joined.ids, self.real)

    def rows(self, index: Tensor | slice) -> "Sequences":
        """Some of the sequences."""
        return Sequences(
            TokenBatch(self.prompts.ids[index], self.prompts.mask[index]),
            TokenBatch(self.responses.ids[index], self.responses.mask[index]),
            None if self.real is None else self.real[index],
        )

    def trimmed(self) -> "Sequences":
        """The same sequences without the columns that are padding in every row."""
        prompt_length = int(self.prompts.mask.sum(dim=1).max())
        response_length = int(self.responses.mask.sum(dim=1).max())
        first = self.prompts.ids.shape[1] - prompt_length
        return Sequences(
            TokenBatch(self.prompts.ids[:, first:], self.prompts.mask[:, first:]),
            TokenBatch(
                self.responses.ids[:, :response_length], self.responses.mask[:, :response_length]
            ),
        )

    def end_aligned(self) -> "Sequences":
        """The same sequences, shifted so that all responses end in the last column.

        Rows are then as wide as the longest of them, not as the longest prompt and the longest
        response together. Before a short response the last R columns hold the end of its prompt.
        """
        joined = self.joined
        lengths = self.responses.mask.sum(dim=1)
        response_length = int(lengths.max())
        width = int(joined.mask.sum(dim=1).max())
        order = joined.mask.long().argsort(dim=1, stable=True)[:, -width:]
        ids, real = joined.ids.gather(1, order), joined.mask.gather(1, order)
        columns = torch.arange(response_length, device=ids.device)
        answers = columns >= response_length - lengths[:, None]
        first = width - response_length
        prompts = TokenBatch(ids[:, :first], real[:, :first])
        return Sequences(prompts, TokenBatch(ids[:, first:], answers), real)

    def to(self, device: torch.device) -> "Sequences":
        """The same sequences on another device."""
        return Sequences(self.prompts.to(device), self.responses.to(device))


def batches_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places in batches of similar length, shortest first, so that little is spent on padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[first : first + size] for first in range(0, len(order), size)]


def response_logits(model: nn.Module, sequences: Sequences) -> Float[Tensor, "B R V"]:
    """Logits, in float32, of the distribution each response token came from."""
    batch = sequences.joined
    row = pack_if_shorter(model, batch, sequences.responses.mask)
    prompt, length = sequences.prompts.ids.shape[1], batch.ids.shape[1]
    logits: Tensor
    with float32_logits(model):
        if row is not None:
            logits = model(**row.model_inputs, logits_to_keep=row.reads.flatten()).logits
            return logits.view(*row.reads.shape, -1)
        kept = torch.arange(prompt - 1, length - 1, device=batch.ids.device)
        logits = model(**batch.model_inputs, logits_to_keep=kept).logits
        return logits


def log_probs_of(
    logits: Float[Tensor, "B R V"], responses: TokenBatch, temperature: float
) -> Float[Tensor, "B R"]:
    """Log-probability of every response token at a temperature, 0 at padding."""
    return log_probs_at(logits, responses.ids[:, :, None], temperature)[:, :, 0] * responses.mask


def log_probs_at(
    logits: Float[Tensor, "B R V"], ids: Int[Tensor, "B R K"], temperature: float
) -> Float[Tensor, "B R K"]:
    """Log-probability of K tokens at every place."""
    scale = temperature + TEMPERATURE_EPSILON
    chosen: Any = _ChosenLogProbs.apply  # torch leaves it untyped
    log_probs: Tensor = chosen(logits.flatten(0, 1), ids.flatten(0, 1), scale)
    return log_probs.view_as(ids)


@torch.no_grad()
def top_log_probs(
    logits: Float[Tensor, "B R V"], k: int, temperature: float
) -> tuple[Int[Tensor, "B R K"], Float[Tensor, "B R K"], Float[Tensor, "B R"]]:
    """The k most likely tokens at every place, their log-probs, and log Σ exp(z / τ)."""
    ids = logits.topk(k, dim=2).indices
    log_probs = log_probs_at(logits, ids, temperature)
    first = logits.gather(2, ids[:, :, :1]).float() / (temperature + TEMPERATURE_EPSILON)
    return ids, log_probs, (first - log_probs[:, :, :1])[:, :, 0]


@torch.no_grad()
def entropy_of(
    logits: Float[Tensor, "B R V"], responses: TokenBatch, temperature: float
) -> Float[Tensor, "B R"]:
    """Entropy in nats of the distribution at every response token, 0 at padding; no gradient."""
    scale = temperature + TEMPERATURE_EPSILON
    flat = logits.flatten(0, 1)
    log_sums = _log_sum_exp(flat, scale)
    entropy = torch.zeros_like(log_sums)
    for part in flat.split(VOCABULARY_CHUNK, dim=1):
        probabilities = (part.float() / scale).sub_(log_sums[:, None]).exp_()
        entropy += torch.special.entr(probabilities).sum(dim=1)
    return entropy.view_as(responses.ids) * responses.mask


def _log_sum_exp(logits: Float[Tensor, "N V"], scale: float) -> Float[Tensor, " N"]:
    """Log-sum-exp of z / τ over the vocabulary, in float32, a chunk of tokens after the other."""
    parts = [
        (part.float() / scale).logsumexp(dim=1) for part in logits.split(VOCABULARY_CHUNK, dim=1)
    ]
    return torch.stack(parts).logsumexp(dim=0)


class _ChosenLogProbs(torch.autograd.Function):
    """log softmax(z / τ) at K tokens a row, N rows of V logits.

    Autograd would keep several float32 copies of all logits; this keeps the logits as they are and
    works through the vocabulary in chunks, in both directions. ∂/∂z_v = Σ_k (1[v = k] − p_v) / τ.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        log_sums = _log_sum_exp(logits, scale)
        ctx.save_for_backward(logits, ids, log_sums)
        ctx.scale = scale
        return logits.gather(1, ids).float() / scale - log_sums[:, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, log_sums = ctx.saved_tensors
        slopes = gradients[0] / ctx.scale
        total = slopes.sum(dim=1, keepdim=True)
        result = torch.empty_like(logits)
        parts = zip(
            logits.split(VOCABULARY_CHUNK, dim=1),
            result.split(VOCABULARY_CHUNK, dim=1),
            strict=True,
        )
        for number, (part, into) in enumerate(parts):
            gradient = (part.float() / ctx.scale).sub_(log_sums[:, None]).exp_().mul_(-total)
            places = ids - number * VOCABULARY_CHUNK
            here = (places >= 0) & (places < part.shape[1])
            into.copy_(gradient.scatter_add_(1, places.where(here, 0), slopes.where(here, 0.0)))
        return result, None, None
