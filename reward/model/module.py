"""The module for training and scoring: rewards of many responses in one forward pass."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import InputError
from rlhf.modeling.attention.layout import TrunkInputs, states
from rlhf.modeling.heads import HEAD, capture_input, head_name, parts_above_trunk, reward_head


@final
class RewardModule(nn.Module):
    """Wraps a classifier with one label, and reads the head's input at given tokens.

    `transformers` finds the last token by comparing with the pad token, which a response may
    contain. Rows are padded on the right, so causal attention needs no mask: no real token attends
    to padding. The head runs in float32 even under autocast: bf16 rounds rewards to steps of 0.02,
    which is too coarse for close pairs.

    A classifier that reads text pairs is run whole, with a mask of padding: its head's input is
    what it makes of a row. With `token_types` it is told which tokens are the response's.
    """

    def __init__(self, classifier: PreTrainedModel, *, token_types: bool = False) -> None:
        super().__init__()
        self.reads_pairs = head_name(classifier) != HEAD  # refuses an unknown architecture
        self.token_types = token_types
        self.classifier = classifier

    @property
    def fp32_modules(self) -> list[nn.Module]:
        """The modules that stay float32 beside bf16 weights: all above the trunk."""
        names = parts_above_trunk(self.classifier)
        return [self.classifier.get_submodule(name) for name in names]

    def forward(self, inputs: TrunkInputs) -> Float[Tensor, " N"]:
        """The reward of every response, in the order of `inputs.reads`."""
        return self.rewards(self.features(inputs))

    def features(self, inputs: TrunkInputs) -> Float[Tensor, "N d"]:
        """The head's input for every response.

        In a decoder it is the trunk's output at the response's last token.

        Raises:
            InputError: a classifier of text pairs applies its head to every token.
        """
        if self.reads_pairs:
            return self._pooled(inputs)[: len(inputs.reads)]  # none of a row of padding
        return states(self.classifier, inputs)[inputs.reads]

    def rewards(self, features: Float[Tensor, "N d"]) -> Float[Tensor, " N"]:
        """The head's output for these features."""
        head = reward_head(self.classifier)
        with torch.autocast(features.device.type, enabled=False):
            rewards: Tensor = head(features.to(head.weight.dtype)).squeeze(-1)
        return rewards.float()

    def _pooled(self, inputs: TrunkInputs) -> Float[Tensor, "B d"]:
        assert inputs.parts is not None
        given = {"input_ids": inputs.ids, "attention_mask": (inputs.parts > 0).long()}
        if self.token_types:
            given["token_type_ids"] = (inputs.parts == 2).long()
        with capture_input(reward_head(self.classifier)) as read:
            self.classifier(**given)
        if read[0].dim() != 2:
            raise InputError(
                f"{type(self.classifier).__name__} pools after its head, not before",
                "Use another model, or this one as a function: --reward "
                "signal:package.module:function.",
            )
        return read[0]
