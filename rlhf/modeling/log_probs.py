"""Log-probabilities of responses: the same function for the reference, rollouts and updates.

Letters: B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf.modeling.attention.packing import pack_if_shorter
from rlhf.modeling.logits.blocks import log_probs_of_hidden, log_probs_of_logits
from rlhf.modeling.logits.projection import (
    factor_dtype,
    float32_logits,
    linear_output,
    replaced_forward,
)
from rlhf.modeling.tokens import TokenBatch, join, pad_left, pad_right

TEMPERATURE_EPSILON = 1e-7

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


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs of K tokens at every place of the responses, and entropies, without gradient.

    At padding both are of some other place's distribution.
    """

    log_probs: Float[Tensor, "B R K"]
    entropy: Float[Tensor, "B R"]

    def first(self, mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
        """Log-probs of the first of the K tokens, 0 at padding."""
        return self.log_probs[:, :, 0] * mask


def response_log_probs(
    model: nn.Module,
    sequences: Sequences,
    temperature: float,
    ids: Int[Tensor, "B R K"] | None = None,
) -> TokenLogProbs:
    """Log-probs at a temperature of every response token, or of `ids`, and entropies.

    No logits of the whole vocabulary are kept where the output layer is a plain linear layer and
    what it returns is what the model returns. Others' logits are read whole: some models scale or
    cap them, 4-bit and adapted output layers have no plain weights.

    Args:
        model: a causal language model.
        sequences: prompts and responses.
        temperature: τ.
        ids: tokens to look up at every place; the response tokens themselves when not given.
    """
    if ids is None:
        ids = sequences.responses.ids[:, :, None]
    scale = temperature + TEMPERATURE_EPSILON
    output = linear_output(model)
    if output is None or isinstance(output.weight, DTensor) or _keeps_logits.get(model) is False:
        return log_probs_from(response_logits(model, sequences), ids, temperature)
    returned: list[Tensor] = []

    def read(hidden: Tensor) -> Tensor:
        dtype = factor_dtype(hidden, output.weight)
        with torch.autocast(hidden.device.type, enabled=False):
            found = log_probs_of_hidden(
                hidden.flatten(0, -2), output.weight, output.bias, ids.flatten(0, 1), scale, dtype
            )
        both = torch.cat([found[0], found[1][:, None]], dim=1)
        returned.append(both.view(*hidden.shape[:-1], -1))
        return returned[0]

    with replaced_forward(output, read):
        found = _response_logits(model, sequences)
    if model not in _keeps_logits:
        _keeps_logits[model] = torch.equal(found, returned[0].view_as(found))
        if not _keeps_logits[model]:
            return log_probs_from(response_logits(model, sequences), ids, temperature)
    return TokenLogProbs(found[:, :, :-1], found[:, :, -1].detach())


# Whether a model returns what its output layer does, or scales or caps it.
_keeps_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def log_probs_from(
    logits: Float[Tensor, "B R V"], ids: Int[Tensor, "B R K"], temperature: float
) -> TokenLogProbs:
    """As `response_log_probs`, from logits that are there already."""
    scale = temperature + TEMPERATURE_EPSILON
    log_probs, entropy, _ = log_probs_of_logits(logits.flatten(0, 1), ids.flatten(0, 1), scale)
    return TokenLogProbs(log_probs.view_as(ids), entropy.view(ids.shape[:2]))


def response_logits(model: nn.Module, sequences: Sequences) -> Float[Tensor, "B R V"]:
    """Logits, in float32, of the distribution each response token came from."""
    with float32_logits(model):
        return _response_logits(model, sequences)


def _response_logits(model: nn.Module, sequences: Sequences) -> Float[Tensor, "B R V"]:
    batch = sequences.joined
    row = pack_if_shorter(model, batch, sequences.responses.mask)
    if row is not None:
        packed: Tensor = model(**row.model_inputs, logits_to_keep=row.reads.flatten()).logits
        return packed.view(*row.reads.shape, -1)
    prompt, length = sequences.prompts.ids.shape[1], batch.ids.shape[1]
    kept = torch.arange(prompt - 1, length - 1, device=batch.ids.device)
    logits: Tensor = model(**batch.model_inputs, logits_to_keep=kept).logits
    return logits


@torch.no_grad()
def top_log_probs(
    logits: Float[Tensor, "B R V"], k: int, temperature: float
) -> tuple[Int[Tensor, "B R K"], Float[Tensor, "B R K"], Float[Tensor, "B R"]]:
    """The k most likely tokens at every place, their log-probs, and log Σ exp(z / τ)."""
    ids = logits.topk(k, dim=2).indices
    scale = temperature + TEMPERATURE_EPSILON
    found = log_probs_of_logits(logits.flatten(0, 1), ids.flatten(0, 1), scale)
    return ids, found[0].view_as(ids), found[2].view(ids.shape[:2])
