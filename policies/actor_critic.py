"""Policy and critic as one module, so that one engine shards, wraps and steps both.

Letters: B sequences, R response tokens, d hidden size.
"""

from typing import Any

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
            None where advantages come without a critic.
        value_bias: the reward model's constant, added to every value; kept in checkpoints.
    """

    def __init__(
        self, policy: PreTrainedModel, critic: PreTrainedModel | None, value_bias: float
    ) -> None:
        super().__init__()
        self.policy = policy
        self.critic: Any = critic
        self.value_bias: Tensor
        self.register_buffer("value_bias", torch.tensor(value_bias))

    @property
    def parts(self) -> dict[str, Any]:
        """What is trained, by name."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"policy": self.policy, **critic}

    def forward(
        self, sequences: Sequences, episodes: int, temperature: float
    ) -> tuple[Float[Tensor, "B R"], Float[Tensor, "E R"] | None]:
        """Log-probs of every response token, and values before each token of the first rows.

        Both in one forward, because data-parallel wrappers synchronise gradients per forward of
        the module.

        Args:
            sequences: episodes, followed by rows of the reference store.
            episodes: how many of the rows are episodes; only they need values.
            temperature: sampling temperature.

        Returns:
            Log-probs of all rows; values of the first `episodes` rows, None without a critic.
        """
        logits = response_logits(self.policy, sequences)
        log_probs = log_probs_of(logits, sequences.responses, temperature)
        if self.critic is None:
            return log_probs, None
        return log_probs, self.values(sequences.rows(slice(0, episodes)))

    def values(self, sequences: Sequences) -> Float[Tensor, "B R"]:
        """The critic's value before each response token."""
        hidden = self.critic_features(sequences)
        head = reward_head(self.critic)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(2)
        return values.float() + self.value_bias

    def critic_features(self, sequences: Sequences) -> Float[Tensor, "B R d"]:
        """What the critic's head reads before each response token."""
        batch = sequences.joined
        length = sequences.responses.ids.shape[1]
        hidden: Tensor = self.critic.base_model(
            input_ids=batch.ids,
            attention_mask=batch.mask.long(),
            position_ids=position_ids(batch.mask),
            use_cache=False,
        ).last_hidden_state
        return hidden[:, -length - 1 : -1]
