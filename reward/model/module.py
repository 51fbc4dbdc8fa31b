"""The module for training and scoring: rewards of many responses in one forward pass."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.modeling.attention.layout import Inputs, states
from rlhf.modeling.models import reward_head


@final
class RewardModule(nn.Module):
    """Wraps a classifier with one label, and reads its head at given tokens.

    `transformers` finds the last token by comparing with the pad token, which a response may
    contain. Rows are padded on the right, so causal attention needs no mask: no real token attends
    to padding. The head runs in float32 even under autocast: bf16 rounds rewards to steps of 0.02,
    which is too coarse for close pairs.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        reward_head(classifier)  # refuses an unknown architecture
        self.classifier = classifier

    def forward(self, inputs: Inputs) -> Float[Tensor, " N"]:
        """The reward of every response, in the order of `inputs.reads`."""
        return self.rewards(self.features(inputs))

    def features(self, inputs: Inputs) -> Float[Tensor, "N d"]:
        """The head's input for every response: the trunk's output at its last token."""
        return states(self.classifier, inputs)[inputs.reads]

    def rewards(self, features: Float[Tensor, "N d"]) -> Float[Tensor, " N"]:
        """The head's output for these features."""
        head = reward_head(self.classifier)
        with torch.autocast(features.device.type, enabled=False):
            rewards: Tensor = head(features.to(head.weight.dtype)).squeeze(-1)
        return rewards.float()
