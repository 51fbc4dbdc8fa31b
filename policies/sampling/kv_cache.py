"""Keys and values during sampling, with room for the tokens to come.

Transformers' own cache copies all keys and values for each new token. Under autocast it also holds
them in float32, which attention rounds again at every token. Letters: B rows, G key-value heads,
S tokens, D head size.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


def new_cache(model: PreTrainedModel, new_tokens: int) -> DynamicCache | None:
    """An empty cache for `generate`; None if a layer of the model keeps something else.

    `new_tokens`: so many are sampled at most.
    """
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [RoomyLayer(new_tokens - 1) for _ in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, in the precision in which attention reads them.

    `keys` and `values` are the first tokens of two larger tensors, which have room for so many more
    than the first that came. Once that is full, and where something else has replaced `keys`, as
    the selection of rows does, the next token brings new ones with as much room.
    """

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self._kept: dict[str, Tensor] = {}  # the larger tensors
        self._views: dict[str, Tensor] = {}

    def update(
        self,
        key_states: Float[Tensor, "B G S D"],
        value_states: Float[Tensor, "B G S D"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; returns the keys and the values of all tokens."""
        device = value_states.device.type
        if torch.is_autocast_enabled(device):  # rotation brought the keys back to float32
            key_states = key_states.to(torch.get_autocast_dtype(device))
            value_states = value_states.to(torch.get_autocast_dtype(device))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = keys = self._append("keys", self.keys, key_states)
        self.values = values = self._append("values", self.values, value_states)
        return keys, values

    def _append(self, name: str, old: Tensor | None, new: Tensor) -> Tensor:
        length = 0 if old is None or not old.numel() else old.shape[2]
        total = length + new.shape[2]
        kept = self._kept.get(name)
        if kept is None or self._views[name] is not old or total > kept.shape[2]:
            batch, heads, _, size = new.shape
            kept = self._kept[name] = new.new_empty(batch, heads, total + self.room, size)
            if old is not None and length:
                kept[:, :, :length] = old
        kept[:, :, length:total] = new
        self._views[name] = kept[:, :, :total]
        return self._views[name]
