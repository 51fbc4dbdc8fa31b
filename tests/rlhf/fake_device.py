"""A device that computes on the CPU, and lists what a program would wait for on a GPU.

`torch` believes that its tensors are on the device `meta`, the only one without hardware whose
gradients it computes; the numbers are in main memory. As on a GPU, tensors here and there do not
mix. A program waits where it reads a number, where a shape depends on one (`nonzero`, a boolean
mask as an index), and for copies, but for those to the device that are asked not to block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from rlhf.parallel.distributed import start

DEVICE = torch.device("meta")
aten: Any = torch.ops.aten
COPIES = (aten._to_copy, aten.copy_, aten.copy)
READS = (
    *(aten._local_scalar_dense, aten.equal, aten.is_nonzero),
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount),
)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class FakeTensor(Tensor):
    """A tensor on the device; `there` has its numbers."""

    @staticmethod
    def __new__(cls, there: Tensor) -> "FakeTensor":
        made: FakeTensor = Tensor._make_wrapper_subclass(
            cls,
            there.size(),
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        return made

    def __init__(self, there: Tensor) -> None:
        self.there = there

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute([], function, args, kwargs or {})


def compute(waits: list[str], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the numbers, and add to `waits` what it would wait for."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    is_there = any(isinstance(one, FakeTensor) for one in tensors)
    given = dict(kwargs)
    goes_there = is_there
    if given.get("device") is not None:
        goes_there = torch.device(given["device"]) == DEVICE
        given["device"] = torch.device("cpu")
    if is_there or goes_there:
        _check(waits, function, args, kwargs, goes_there=goes_there)
    plain = tree_map(lambda one: one.there if isinstance(one, FakeTensor) else one, (args, given))
    found = function(*plain[0], **plain[1])
    if not goes_there:
        return found
    found = tree_map(lambda one: FakeTensor(one) if isinstance(one, Tensor) else one, found)
    return return_and_correct_aliasing(function, args, kwargs, found) if is_there else found


def _check(
    waits: list[str],
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    goes_there: bool,
) -> None:
    kind = function.overloadpacket
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    here = [one for one in tensors if not isinstance(one, FakeTensor) and one.dim()]
    if kind in COPIES:
        if kind is not aten._to_copy:
            goes_there = isinstance(args[0], FakeTensor)
        source = args[-1] if kind is not aten._to_copy else args[0]
        non_blocking = kwargs.get("non_blocking", False)
        if isinstance(source, FakeTensor) != goes_there and not (goes_there and non_blocking):
            waits.append(f"{function} {'to' if goes_there else 'from'} the device")
    elif kind in INDEXING:
        indices = [one for one in args[1] if one is not None]
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
            waits.append(f"{function} by a mask")
        if any(not isinstance(one, FakeTensor) for one in indices):
            waits.append(f"{function} by an index in main memory")
    elif (kind is aten.repeat_interleave and "output_size" not in kwargs) or kind in READS:
        waits.append(str(function))
    elif here and tensors and goes_there:
        raise RuntimeError(f"{function} mixes tensors of the device and of main memory")


class _Operations(TorchDispatchMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(self.waits, function, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Lists of Python from and to the device, which torch does not know for these tensors."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.tolist and isinstance(args[0], FakeTensor):
            self.waits.append("tolist")
            return args[0].there.tolist()
        if function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            device = kwargs.pop("device", None)
            if device is not None and torch.device(device) == DEVICE:
                self.waits.append("torch.tensor to the device")
                return function(*args, **kwargs).to(DEVICE, non_blocking=True)
        return function(*args, **kwargs)


@contextmanager
def waiting() -> Iterator[list[str]]:
    """The list of what is waited for within the block."""
    waits: list[str] = []
    with _Functions(waits), _Operations(waits):
        yield waits


def on_device(module: torch.nn.Module) -> torch.nn.Module:
    """The module, moved to the device; weights that are shared stay so."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with waiting():
            return module.to(DEVICE)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def numbers(value: Tensor) -> Tensor:
    """The numbers of a tensor of the device."""
    assert isinstance(value, FakeTensor)
    return value.there


def use_device(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """An accelerator of the device, without autocast, which does not know it."""
    accelerator = start("fp32", 0)
    for state in (PartialState, AcceleratorState):
        monkeypatch.setitem(state._shared_state, "device", DEVICE)
    plain = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
        return plain("cpu" if device_type == DEVICE.type else device_type, *args, **kwargs)

    is_enabled: Callable[..., bool] = torch.is_autocast_enabled

    def is_autocast_enabled(device_type: str = "cpu") -> bool:
        return device_type != DEVICE.type and is_enabled(device_type)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", is_autocast_enabled)
    return accelerator
