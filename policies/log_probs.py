"""Log-probabilities of responses: the same function for the reference, rollouts and updates.

Letters: B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.tokens import TokenBatch, join, position_ids

TEMPERATURE_EPSILON = 1e-7


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


def response_logits(
    model: nn.Module, sequences: Sequences, temperature: float
) -> Float[Tensor, "B R V"]:
    """Float32 logits over the temperature, of the distribution each response token came from."""
    batch = sequences.joined
    length = sequences.responses.ids.shape[1]
    logits = model(
        input_ids=batch.ids,
        attention_mask=batch.mask.long(),
        position_ids=position_ids(batch.mask),
        logits_to_keep=length
        + 1,  # the logits before the first response token, and all but the last
        use_cache=False,
    ).logits[:, :-1]
    scaled: Tensor = logits.float() / (temperature + TEMPERATURE_EPSILON)
    return scaled


def log_probs_of(logits: Float[Tensor, "B R V"], responses: TokenBatch) -> Float[Tensor, "B R"]:
    """Log-probability of every response token, 0 at padding."""
    chosen = logits.gather(2, responses.ids[:, :, None]).squeeze(2)
    return (chosen - logits.logsumexp(dim=2)) * responses.mask


def entropy_of(logits: Float[Tensor, "B R V"], responses: TokenBatch) -> Float[Tensor, "B R"]:
    """Entropy in nats of the distribution at every response token, 0 at padding."""
    log_probs = logits.log_softmax(dim=2)
    return -(log_probs.exp() * log_probs).sum(dim=2) * responses.mask
