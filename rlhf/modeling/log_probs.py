"""Log-probabilities of responses: the same function for the reference, rollouts and updates.

Letters: B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhf.modeling.attention.layout import TrunkInputs, states
from rlhf.modeling.attention.packing import features_of_padded, pack_if_shorter
from rlhf.modeling.logits.blocks import (
    Distributions,
    chosen_log_probs,
    most_likely,
    statistics,
)
from rlhf.modeling.logits.projection import (
    factor_dtype,
    float32_logits,
    linear_output,
    replaced_forward,
)
from rlhf.modeling.tokens import TokenBatch, join, pad_left, pad_right, send

TEMPERATURE_EPSILON = 1e-7

SCORE_BATCH = 32  # sequences whose log-probs are computed at once, at most


@dataclass(frozen=True)
class Sequences:
    """Left-padded prompts (B, P) and right-padded responses (B, R).

    `real` marks the real tokens of both side by side where the two masks do not: see `end_aligned`.
    `host` are the same sequences in main memory, where these are on a device: batches are planned
    there, since every number that is read from a GPU waits for all that it has to do before.
    """

    prompts: TokenBatch
    responses: TokenBatch
    real: Bool[Tensor, "B T"] | None = None
    host: "Sequences | None" = None

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

    @property
    def on_host(self) -> "Sequences":
        """The same sequences in main memory, where they are known there."""
        return self if self.host is None else self.host

    def rows(self, index: Tensor | slice) -> "Sequences":
        """Some of the sequences."""
        return Sequences(
            TokenBatch(self.prompts.ids[index], self.prompts.mask[index]),
            TokenBatch(self.responses.ids[index], self.responses.mask[index]),
            None if self.real is None else self.real[index],
            None if self.host is None else self.host.rows(index),
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
        response_mask = columns >= response_length - lengths[:, None]
        first = width - response_length
        prompts = TokenBatch(ids[:, :first], real[:, :first])
        return Sequences(prompts, TokenBatch(ids[:, first:], response_mask), real)

    def to(self, device: torch.device) -> "Sequences":
        """The same sequences on another device."""
        host = self.on_host
        if host.prompts.ids.device == device:
            return host
        real = None if host.real is None else send(host.real, device)
        return Sequences(host.prompts.to(device), host.responses.to(device), real, host)

    def packed_for(self, model: Any) -> TrunkInputs | None:
        """One row on the sequences' device, if the model reads such rows and it is shorter."""
        host = self.on_host
        row = pack_if_shorter(model, host.joined, host.responses.mask)
        return None if row is None else row.to(self.prompts.ids.device)


def batches_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places in batches of similar length, shortest first, so that little is spent on padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[first : first + size] for first in range(0, len(order), size)]


def batches_by_prompt(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> list[list[int]]:
    """Places in batches, responses to one prompt side by side, prompts with short responses first.

    Packed rows then hold a prompt once for its responses, and padded rows little padding.

    Args:
        prompts: token ids of the prompt of each response.
        lengths: of the responses, in tokens.
        size: of a batch.
    """
    keys = [tuple(prompt) for prompt in prompts]
    longest: dict[tuple[int, ...], int] = {}
    for key, length in zip(keys, lengths, strict=True):
        longest[key] = max(length, longest.get(key, 0))
    order = sorted(range(len(keys)), key=lambda row: (longest[keys[row]], keys[row], lengths[row]))
    return [order[first : first + size] for first in range(0, len(order), size)]


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs of K tokens at every position of the responses, and entropies without gradient.

    Values at padding have no meaning.
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

    Logits of the whole vocabulary exist only for models that scale or cap them, for 4-bit and
    adapted output layers, and under tensor parallelism.

    Args:
        model: a causal language model.
        sequences: prompts and responses.
        temperature: τ.
        ids: tokens to look up at every position; by default the response tokens.
    """
    if ids is None:
        ids = sequences.responses.ids[:, :, None]
    scale = temperature + TEMPERATURE_EPSILON

    def read(distributions: Distributions, chosen: Int[Tensor, "N K"]) -> Float[Tensor, "N C"]:
        log_probs, entropy = chosen_log_probs(distributions, chosen, scale)
        return torch.cat([log_probs, entropy[:, None]], dim=1)

    values = _read_output(model, sequences, ids, read)
    return TokenLogProbs(values[:, :, :-1], values[:, :, -1].detach())


@dataclass(frozen=True)
class ReferenceLogProbs:
    """What the reference store keeps of every response token; values at padding have no meaning.

    The K largest logits are τ (`top_log_probs` + `log_sum_exp`).
    """

    log_probs: Float[Tensor, "B R"]
    log_probs_at_1: Float[Tensor, "B R"]
    entropy: Float[Tensor, "B R"]
    top_ids: Int[Tensor, "B R K"]
    top_log_probs: Float[Tensor, "B R K"]
    log_sum_exp: Float[Tensor, "B R"]


@torch.no_grad()
def reference_log_probs(
    model: nn.Module, sequences: Sequences, temperature: float, top_k: int = 0
) -> ReferenceLogProbs:
    """Log-probs at a temperature and at 1, and the `top_k` most likely tokens of each position."""
    scales = [temperature + TEMPERATURE_EPSILON, 1.0 + TEMPERATURE_EPSILON]

    def read(distributions: Distributions, chosen: Int[Tensor, "N 1"]) -> Float[Tensor, "N C"]:
        top = most_likely(distributions, top_k) if top_k else chosen[:, :0]
        at_temperature, at_1 = statistics(distributions, torch.cat([chosen, top], dim=1), scales)
        columns = at_temperature.log_sum_exp, at_temperature.entropy, at_1.log_probs[:, 0]
        # float32 holds integers up to 2²⁴ exactly
        return torch.cat(
            [torch.stack(columns, dim=1), top.float(), at_temperature.log_probs], dim=1
        )

    values = _read_output(model, sequences, sequences.responses.ids[:, :, None], read)
    numbers, ids, log_probs = values.split([3, top_k, 1 + top_k], dim=2)
    log_sum_exp, entropy, at_1 = numbers.unbind(dim=2)
    return ReferenceLogProbs(
        log_probs[:, :, 0], at_1, entropy, ids.long(), log_probs[:, :, 1:], log_sum_exp
    )


def _read_output(
    model: nn.Module,
    sequences: Sequences,
    ids: Int[Tensor, "B R K"],
    read: Callable[[Distributions, Int[Tensor, "N K"]], Float[Tensor, "N C"]],
) -> Float[Tensor, "B R C"]:
    """Apply `read` to the distributions of the response tokens and to what is looked up in them.

    The output layer runs `read` and returns its result in place of logits, so that these need not
    exist. That works if the layer is a plain linear one with all its weights here, and the model
    returns what the layer does. Otherwise `read` gets the model's logits.
    """
    wanted = _Wanted.of(model, sequences)
    chosen = wanted.of_tokens(ids)
    output = linear_output(model)
    if output is not None and _returns_logits_unchanged.get(model, True):
        plain, returned = output.forward, list[Tensor]()

        def forward(hidden: Tensor) -> Tensor:
            if isinstance(output.weight, DTensor):  # tensor parallel; FSDP's is whole here
                return plain(hidden)  # type: ignore[no-any-return]
            flat, dtype = hidden.flatten(0, -2), factor_dtype(hidden, output.weight)
            with torch.autocast(hidden.device.type, enabled=False):
                columns = read(Distributions(flat, output.weight, output.bias, dtype), chosen)
            returned.append(columns.view(*hidden.shape[:-1], -1))
            return returned[-1]

        with replaced_forward(output, forward):
            values = wanted.logits(model)
        if model not in _returns_logits_unchanged:
            _returns_logits_unchanged[model] = bool(returned) and torch.allclose(
                values, returned[0].view_as(values), rtol=0, atol=0, equal_nan=True
            )
        if _returns_logits_unchanged[model]:
            return by_response(values, sequences)
    with float32_logits(model):
        logits = wanted.logits(model)
    return by_response(read(Distributions(logits), chosen), sequences)


# By model: False if it scales or caps what its output layer returns; found out in one forward.
_returns_logits_unchanged: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def features(model: PreTrainedModel, sequences: Sequences) -> Float[Tensor, "B R d"]:
    """The output of the layers below the head, before each response token."""
    row = sequences.packed_for(model)
    if row is None:
        return features_of_padded(model, sequences.joined, sequences.responses.ids.shape[1])
    return states(model, row)[row.reads]


def by_response(values: Float[Tensor, "N C"], sequences: Sequences) -> Float[Tensor, "B R C"]:
    """Values that the output layer reads or returns, by response token.

    Args:
        values: a row for each position that it reads: of padded rows all B · R, of a packed row
            those of response tokens.
        sequences: what the model read.

    Returns:
        A row for each response token; 0 at padding of packed rows.
    """
    shape = sequences.responses.ids.shape
    if len(values) < shape.numel():
        indices = _token_indices(sequences)
        values = values.new_zeros(shape.numel(), values.shape[1]).index_copy(0, indices, values)
    return values.view(*shape, -1)


def _token_indices(sequences: Sequences) -> Int[Tensor, " N"]:
    """The indices of the response tokens among all B · R, without waiting for a device."""
    indices = sequences.on_host.responses.mask.flatten().nonzero().squeeze(1)
    return send(indices, sequences.responses.ids.device)


@dataclass(frozen=True)
class _Wanted:
    """What a model reads, and the positions before response tokens, whose logits are wanted.

    Attributes:
        inputs: arguments of the model.
        kept: the positions, of every padded row or of one packed row.
        tokens: of a packed row, the indices of its N response tokens among all B · R; None: of
            padded rows, where padding has logits, too.
    """

    inputs: dict[str, Any]
    kept: Int[Tensor, " N"]
    tokens: Int[Tensor, " N"] | None

    @classmethod
    def of(cls, model: nn.Module, sequences: Sequences) -> "_Wanted":
        row = sequences.packed_for(model)
        if row is None:
            batch = sequences.joined
            prompt, length = sequences.prompts.ids.shape[1], batch.ids.shape[1]
            positions = torch.arange(prompt - 1, length - 1, device=batch.ids.device)
            return cls(batch.model_inputs, positions, None)
        tokens = _token_indices(sequences)
        return cls(row.model_inputs, row.reads.flatten()[tokens], tokens)

    def of_tokens(self, ids: Int[Tensor, "B R K"]) -> Int[Tensor, "N K"]:
        """The rows of `ids` at these positions."""
        flat = ids.flatten(0, 1)
        return flat if self.tokens is None else flat[self.tokens]

    def logits(self, model: nn.Module) -> Float[Tensor, "N V"]:
        """What the model's output layer returns."""
        logits: Tensor = model(**self.inputs, logits_to_keep=self.kept).logits
        return logits.flatten(0, 1)
