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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def new_cache(model: PreTrainedModel, new_tokens: int) -> DynamicCache | None:
    """An empty cache for `generate`; None if a layer keeps anything other than keys and values.

    `new_tokens`: the most that are sampled.
    """
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    layers = list(cache.layers)
    cache.layers = [own for layer in layers if (own := _own_layer(layer, new_tokens - 1))]
    return cache if len(cache.layers) == len(layers) else None


def _own_layer(layer: object, room: int) -> DynamicLayer | None:
    if type(layer) is DynamicLayer:
        return RoomyLayer(room)
    if type(layer) is DynamicSlidingWindowLayer:
        return RoundedWindowLayer(layer.sliding_window)
    return None


def as_attention_reads(states: Tensor) -> Tensor:
    """Keys or values in autocast's precision; rotation brings keys back to float32."""
    device = states.device.type
    if not torch.is_autocast_enabled(device):
        return states
    return states.to(torch.get_autocast_dtype(device))


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, in the precision in which attention reads them.

    `keys` and `values` are the first tokens of two larger tensors: these have room for `room`
    tokens after the first that came. Once they are full, and where the rows were chosen anew, the
    next token brings larger ones.
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
        key_states, value_states = as_attention_reads(key_states), as_attention_reads(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = keys = self._append("keys", self.keys, key_states)
        self.values = values = self._append("values", self.values, value_states)
        return keys, values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._free()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._free()

    def _free(self) -> None:
        """Give back the larger tensors, of which `keys` and `values` are no part any more."""
        self._kept, self._views = {}, {}

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


class RoundedWindowLayer(DynamicSlidingWindowLayer):
    """The last keys and values of one layer, in the precision in which attention reads them."""

    def update(
        self,
        key_states: Float[Tensor, "B G S D"],
        value_states: Float[Tensor, "B G S D"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; returns the keys and the values that they may see."""
        states = as_attention_reads(key_states), as_attention_reads(value_states)
        keys_and_values: tuple[Tensor, Tensor] = super().update(*states, *args, **kwargs)
        return keys_and_values
