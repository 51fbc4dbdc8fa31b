"""Gather all weights of a sharded model, to sample from it or to save it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf.parallel.master_weights import rounded_weights
from rlhf.parallel.sharding import unwrap


class GatheredModel:
    """A plain copy of a sharded model that holds weights only inside `weights_of`.

    A sharded model would gather its weights again for every sampled token; the copy gathers them
    once. `fills` counts how often.

    Args:
        model: not yet prepared.
        device: of the copy.
        is_copy: whether there is a copy; without, this is the model itself.
        bf16_weights: as in `prepare`.
        fp32_modules: as in `prepare`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        is_copy: bool,
        bf16_weights: bool = False,
        fp32_modules: Sequence[nn.Module] = (),
    ) -> None:
        self.fills = 0
        self._depth = 0
        self._is_copy = is_copy
        self.module: Any = model
        if not is_copy:
            return
        in_bf16 = rounded_weights(model, fp32_modules) if bf16_weights else []
        rounded = {id(parameter) for parameter in in_bf16}
        empty = {
            id(parameter): nn.Parameter(
                torch.empty(
                    0,
                    dtype=torch.bfloat16 if id(parameter) in rounded else parameter.dtype,
                    device=device,
                ),
                # autocast caches casts of weights that require gradients, others it casts per token
                requires_grad=parameter.requires_grad,
            )
            for parameter in model.parameters()
        }
        self.module = copy.deepcopy(model, empty).to(device)

    @contextmanager
    def weights_of(self, model: nn.Module) -> Iterator[Any]:
        """The plain module with the weights that the prepared `model` has now; all ranks call it.

        Inside another `weights_of` nothing is gathered: the weights are there.
        """
        self._depth += 1
        try:
            if self._depth == 1 and self._is_copy:
                self._fill(model)
            yield self.module
        finally:
            self._depth -= 1
            if self._depth == 0 and self._is_copy:
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.new_empty(0)

    def _fill(self, model: nn.Module) -> None:
        self.fills += 1
        source = unwrap(model)
        for mine, theirs in zip(self.module.parameters(), source.parameters(), strict=True):
            mine.data = whole(theirs, mine.device, mine.dtype)
        for mine, theirs in zip(self.module.buffers(), source.buffers(), strict=True):
            mine.copy_(theirs)


@torch.no_grad()
def whole(parameter: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The whole parameter, on every process; a view of it where it is not sharded.

    What is sharded is cast to `dtype` before it is sent.
    """
    if isinstance(parameter, DTensor):
        here: Any = parameter.detach().to(device=device, dtype=dtype or parameter.dtype)
        gathered: Tensor = here.full_tensor()
        return gathered
    if hasattr(parameter, "ds_id"):
        from rlhf.parallel import zero

        return zero.whole(parameter)
    return parameter.detach()


def gather_on_main(accelerator: Accelerator, value: Tensor) -> Tensor:
    """A weight, whole in the main process; without storage in others where it is sharded.

    All processes call it: what is sharded is gathered, and goes into main memory.
    """
    if not is_shard(value):
        return value.detach()
    gathered = whole(value, accelerator.device)
    return gathered.cpu() if accelerator.is_main_process else without_storage(value)


def without_storage(value: Tensor) -> Tensor:
    """A tensor with the whole shape of a weight that may be sharded, on the device `meta`."""
    shape = getattr(value, "ds_shape", value.shape)  # under ZeRO 3 `shape` is empty
    return torch.empty(shape, dtype=value.dtype, device="meta")


def is_shard(parameter: Tensor) -> bool:
    """True for a weight of which this process holds a part."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")
