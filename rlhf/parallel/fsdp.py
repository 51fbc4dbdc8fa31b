"""PyTorch's FSDP2 on a model: which modules are sharded by themselves, and in which precision."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from rlhf.parallel.distributed import extend_timeouts
from rlhf.parallel.layers import (
    ON_MAIN,
    allocate,
    find_layers,
    find_matrices,
    load_own_shards,
    stored_at,
    take_from_main,
)

if TYPE_CHECKING:
    from rlhf.parallel.sharding import Sharding

MESH = ("copies", "parts")
_arranged: dict[tuple[str, int, int], tuple[Any, DeviceMesh]] = {}  # with all processes of then


def make_mesh(device: torch.device, processes: int, group: int = 0) -> DeviceMesh:
    """The mesh of processes: one row, or rows of `group`. A row shards, columns hold copies.

    Neighboring ranks, which are on one machine, are in one row. Of one kind there is one mesh: each
    makes groups of its own, which PyTorch keeps.
    """
    kind = device.type, processes, group
    world, mesh = _arranged.get(kind, (None, None))
    if mesh is None or world is not dist.group.WORLD:
        sizes, names = ((processes // group, group), MESH) if group else ((processes,), None)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        extend_timeouts()
        _arranged[kind] = dist.group.WORLD, mesh
    return mesh


def shard_all(
    model: nn.Module,
    sharding: "Sharding",
    mesh: DeviceMesh,
    *,
    bf16: bool,
    free_rest: bool | None = None,
    bf16_weights: bool = False,
    fp32_modules: Sequence[nn.Module] = (),
) -> None:
    """Shard every layer, embeddings and output matrix, then the rest.

    Weights that are still in files are never whole: every process reads its part of them. Others
    are whole only while they are sharded: where only the main process has read them, it sends them
    one layer at a time. The rest stays gathered between forward and backward pass, unless
    `free_rest` is true. It includes embeddings that are the output matrix, too: both ends of the
    model read them. With `bf16` layers are gathered in bf16; with `bf16_weights` so is all else but
    `fp32_modules`.

    Raises:
        InputError: a process cannot read its part; in every process.
    """
    lacks_weights = _lacks_weights(model)
    for part in fp32_modules if bf16_weights else ():
        _shard(part, sharding, mesh, lacks_weights)
    shard_parts(model, sharding, mesh, bf16=bf16, free_rest=free_rest, bf16_weights=bf16_weights)
    policy = _precision(sharding, rounds=bf16_weights)
    options = {"reshard_after_forward": free_rest, "mp_policy": policy}
    _shard(model, sharding, mesh, lacks_weights, **options)
    load_own_shards(model.parameters())


def shard_parts(
    model: nn.Module,
    sharding: "Sharding",
    mesh: DeviceMesh,
    *,
    bf16: bool,
    free_rest: bool | None = None,
    bf16_weights: bool = False,
) -> None:
    """Like `shard_all`, for what is not sharded yet."""
    outside = _precision(sharding, rounds=bf16_weights)
    inside = _precision(sharding, rounds=bf16)
    again = sharding.reshard or bool(free_rest)
    lacks_weights = _lacks_weights(model)
    for matrix in find_matrices(model):
        _shard(matrix, sharding, mesh, lacks_weights, mp_policy=outside)
    for layer in find_layers(model):
        options = {"reshard_after_forward": again, "mp_policy": inside}
        _shard(layer, sharding, mesh, lacks_weights, **options)
    load_own_shards(weight for weight in model.parameters() if isinstance(weight, DTensor))


def _precision(sharding: "Sharding", *, rounds: bool) -> MixedPrecisionPolicy:
    """That of gathered weights, bf16 if `rounds`, and that in which gradients are added up."""
    if sharding.reduce_dtype == "bf16":
        added_up: torch.dtype | None = torch.bfloat16
    else:
        added_up = torch.float32 if rounds else None
    weights = torch.bfloat16 if rounds else None
    return MixedPrecisionPolicy(weights, added_up, cast_forward_inputs=not rounds)


def _lacks_weights(model: nn.Module) -> bool:
    """Whether only the main process has read the weights of a model inside."""
    return any(hasattr(part, ON_MAIN) for part in model.modules())


def _shard(
    part: nn.Module, sharding: "Sharding", mesh: DeviceMesh, lacks_weights: bool, **options: Any
) -> None:
    if isinstance(part, FSDPModule):
        return
    pinned = mesh.device_type != "cpu"
    policy = CPUOffloadPolicy(pin_memory=pinned) if sharding.offload else OffloadPolicy()
    whole = {
        name: parameter for name, parameter in _each(part) if not isinstance(parameter, DTensor)
    }
    for parameter in dict.fromkeys(whole.values()) if lacks_weights else ():
        if stored_at(parameter) is None:
            take_from_main(parameter, mesh.device_type)
    fully_shard(part, mesh=mesh, offload_policy=policy, **options)
    sharded = dict(_each(part))
    for name, parameter in whole.items():
        stored = stored_at(parameter)
        if stored and sharded[name].is_meta:  # a tied one has storage after the first of its names
            allocate(sharded[name], "cpu" if sharding.offload else mesh.device_type, stored)
        parameter.data = parameter.new_empty(0)  # the optimizer still refers to it


def _each(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by name, those that are tied under each of their names."""
    return part.named_parameters(remove_duplicate=False)
