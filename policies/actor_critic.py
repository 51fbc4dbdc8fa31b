"""Policy and critic as one module, so that one engine shards, wraps and steps both.

Letters: B sequences, R response tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.log_probs import Sequences, log_probs_of, response_logits
from rlhf.models import reward_head
from rlhf.tokens import position_ids


class PolicyAndCritic(nn.Module):
    """A language model and a value model that starts as the reward model.

    Args:
        policy: the language model.
        critic: a reward model; its head, read at every token instead of the last, gives the values.
        value_bias: the reward model's constant, added to every value.
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel, value_bias: float) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.value_bias = value_bias

    def forward(
        self, sequences: Sequences, episodes: int, temperature: float
    ) -> tuple[Float[Tensor, "B R"], Float[Tensor, "E R"]]:
        """Log-probs of every response token, and values before each token of the first rows.

        Both in one forward, because data-parallel wrappers synchronise gradients per forward of
        the module.

        Args:
            sequences: episodes, followed by rows of the reference store.
            episodes: how many of the rows are episodes; only they need values.
            temperature: sampling temperature.

        Returns:
            Log-probs of all rows and values of the first `episodes` rows.
        """
        logits = response_logits(self.policy, sequences, temperature)
        log_probs = log_probs_of(logits, sequences.responses)
        return log_probs, self.values(sequences.rows(slice(0, episodes)))

    def values(self, sequences: Sequences) -> Float[Tensor, "B R"]:
        """The critic's value before each response token."""
        batch = sequences.joined
        length = sequences.responses.ids.shape[1]
        hidden = self.critic.base_model(
            input_ids=batch.ids,
            attention_mask=batch.mask.long(),
            position_ids=position_ids(batch.mask),
            use_cache=False,
        ).last_hidden_state[:, -length - 1 : -1]
        head = reward_head(self.critic)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(2)
        return values.float() + self.value_bias
