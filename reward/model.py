"""The module that training and scoring run: rewards of many responses in one forward pass."""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models import reward_head


@dataclass(frozen=True)
class Stretch:
    """One prompt in a packed row: `prompt` tokens, then its responses of these lengths."""

    prompt: int
    responses: tuple[int, ...]


Layout = tuple[Stretch, ...]


@dataclass(frozen=True)
class Inputs:
    """Token ids and where each response ends, counting tokens over the rows laid end to end.

    Either right-padded rows, one a response, or one packed row with its positions and layout.
    """

    ids: Int[Tensor, "B T"]
    reads: Int[Tensor, " N"]
    positions: Int[Tensor, "B T"] | None = None
    layout: Layout | None = None

    @property
    def named(self) -> dict[str, Any]:
        """What a model is fed."""
        packed = {"position_ids": self.positions, "layout": self.layout} if self.layout else {}
        return {"input_ids": self.ids, "use_cache": False, **packed}

    def to(self, device: torch.device) -> "Inputs":
        """The same inputs on another device."""
        positions = None if self.positions is None else self.positions.to(device)
        return Inputs(self.ids.to(device), self.reads.to(device), positions, self.layout)


@final
class RewardModule(nn.Module):
    """Wraps a classifier with one label and reads its head where it is told.

    `transformers` finds the last token by comparing with the pad token, which a response may
    contain; here the caller says where to read. Rows are padded on the right, so causal attention
    needs no mask: nothing real looks at padding. The head runs in float32 even under autocast: bf16
    steps of 0.02 would blur close pairs.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        reward_head(classifier)  # refuses an unknown architecture
        self.classifier = classifier

    def forward(self, inputs: Inputs) -> Float[Tensor, " N"]:
        """The reward of every response, in the order of `inputs.reads`."""
        return self.rewards(self.features(inputs))

    def features(self, inputs: Inputs) -> Float[Tensor, "N d"]:
        """What the head reads of every response: the trunk's output at its last token."""
        return states(self.classifier, inputs)[inputs.reads]

    def rewards(self, features: Float[Tensor, "N d"]) -> Float[Tensor, " N"]:
        """What the head makes of features."""
        head = reward_head(self.classifier)
        with torch.autocast(features.device.type, enabled=False):
            rewards: Tensor = head(features.to(head.weight.dtype)).squeeze(-1)
        return rewards.float()


def states(model: PreTrainedModel, inputs: Inputs) -> Float[Tensor, "T d"]:
    """What the layers below the head give for every token, rows laid end to end."""
    trunk: nn.Module = model.base_model
    found: Tensor = trunk(**inputs.named).last_hidden_state.flatten(0, 1)
    return found


def last_tokens(lengths: Int[Tensor, " B"], width: int) -> Int[Tensor, " B"]:
    """Where each right-padded row ends."""
    return torch.arange(len(lengths), device=lengths.device) * width + lengths - 1
