"""Log-probabilities of responses: the same function for the reference, rollouts and updates.

Letters: B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.tokens import TokenBatch, join, position_ids

TEMPERATURE_EPSILON = 1e-7
CHUNK = 64  # rows of logits that are float32 at one time


@dataclass(frozen=True)
class Sequences:
    """Left-padded prompts (B, P) and right-padded responses (B, R)."""

    prompts: TokenBatch
    responses: TokenBatch

    @property
    def joined(self) -> TokenBatch:
        """Prompts and responses side by side, (B, P + R)."""
        return join(self.prompts, self.responses)

    def rows(self, index: Tensor | slice) -> "Sequences":
        """Some of the sequences."""
        return Sequences(
            TokenBatch(self.prompts.ids[index], self.prompts.mask[index]),
            TokenBatch(self.responses.ids[index], self.responses.mask[index]),
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

    def to(self, device: torch.device) -> "Sequences":
        """The same sequences on another device."""
        return Sequences(self.prompts.to(device), self.responses.to(device))


def response_logits(model: nn.Module, sequences: Sequences) -> Float[Tensor, "B R V"]:
    """Logits, in the model's precision, of the distribution each response token came from."""
    batch = sequences.joined
    prompt, length = sequences.prompts.ids.shape[1], batch.ids.shape[1]
    logits: Tensor = model(
        input_ids=batch.ids,
        attention_mask=batch.mask.long(),
        position_ids=position_ids(batch.mask),
        logits_to_keep=torch.arange(prompt - 1, length - 1, device=batch.ids.device),
        use_cache=False,
    ).logits
    return logits


def log_probs_of(
    logits: Float[Tensor, "B R V"], responses: TokenBatch, temperature: float
) -> Float[Tensor, "B R"]:
    """Log-probability of every response token at a temperature, 0 at padding."""
    scale = temperature + TEMPERATURE_EPSILON
    chosen: Any = _ChosenLogProbs.apply  # torch leaves it untyped
    log_probs: Tensor = chosen(logits.flatten(0, 1), responses.ids.flatten(), scale)
    return log_probs.view_as(responses.ids) * responses.mask


@torch.no_grad()
def entropy_of(
    logits: Float[Tensor, "B R V"], responses: TokenBatch, temperature: float
) -> Float[Tensor, "B R"]:
    """Entropy in nats of the distribution at every response token, 0 at padding; no gradient."""
    scale = temperature + TEMPERATURE_EPSILON
    parts = []
    for part in logits.flatten(0, 1).split(CHUNK):
        log_probs = (part.float() / scale).log_softmax(dim=1)
        parts.append(-(log_probs.exp() * log_probs).sum(dim=1))
    return torch.cat(parts).view_as(responses.ids) * responses.mask


class _ChosenLogProbs(torch.autograd.Function):
    """log softmax(z / τ) at one token a row, N rows of V logits.

    Autograd would keep several float32 copies of all logits; this keeps the logits as they are and
    works through them in chunks, in both directions. ∂/∂z_v = (1[v is chosen] − p_v) / τ.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        parts = [(part.float() / scale).logsumexp(dim=1) for part in logits.split(CHUNK)]
        normalisers = torch.cat(parts)
        ctx.save_for_backward(logits, ids, normalisers)
        ctx.scale = scale
        return logits.gather(1, ids[:, None]).squeeze(1).float() / scale - normalisers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, normalisers = ctx.saved_tensors
        slopes = gradients[0] / ctx.scale
        result = torch.empty_like(logits)
        for first in range(0, len(ids), CHUNK):
            rows = slice(first, first + CHUNK)
            part = (logits[rows].float() / ctx.scale).sub_(normalisers[rows, None]).exp_()
            part.mul_(-slopes[rows, None])
            result[rows] = part.scatter_add_(1, ids[rows, None], slopes[rows, None])
        return result, None, None
