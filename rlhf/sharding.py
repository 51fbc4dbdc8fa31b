"""One flag, `--sharding`, that spreads a training over the processes of its group.

    none    what `accelerate launch` was configured with, else ddp
    ddp     every process holds everything, gradients are averaged
    fsdp    weights, gradients and optimizer are divided (PyTorch's FSDP2)
    zero1   DeepSpeed: the optimizer is divided
    zero2   … and the gradients
    zero3   … and the weights

Under `--tensor-parallel` all processes hold one model together instead: transformers has divided
its matrices while it was loaded, every process sees the same batch, and gradients need no average.

Weights stay float32 under all of them and autocast multiplies in bf16, so every one gives the
losses of a single process. accelerate forms the group; it drives neither FSDP2 nor DeepSpeed here,
because its way of doing so steps the optimizer inside `backward` and refuses machines without GPUs,
where these paths are tested.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from rlhf.cluster import Strategy
from rlhf.distributed import PATIENCE
from rlhf.errors import ConfigError, InputError
from rlhf.ranks import world_size
from rlhf.together import hold_together

ACCELERATE_FSDP = "ACCELERATE_USE_FSDP"
ACCELERATE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"


@dataclass(frozen=True)
class Sharding:
    """How a training is spread.

    Attributes:
        strategy: what processes divide.
        offload: what is divided waits in main memory.
        group: processes that divide one copy between them, the other groups hold copies of it; 0
            is all of them.
        reshard: layers are given back after the forward pass and gathered again for the backward.
        deepspeed: a DeepSpeed configuration of the user's own.
        tensor_parallel: processes that hold one model together; all there are, or 1.
    """

    strategy: Strategy = "none"
    offload: bool = False
    group: int = 0
    reshard: bool = True
    deepspeed: dict[str, Any] = field(default_factory=dict)
    tensor_parallel: int = 1

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage; 0 where DeepSpeed has no part."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @property
    def divides(self) -> bool:
        """True where no process holds the whole training."""
        return self.strategy not in ("none", "ddp") or self.is_together

    @property
    def is_together(self) -> bool:
        """True where all processes work on the same batch, with a part of every matrix each."""
        return self.tensor_parallel > 1

    @property
    def divides_weights(self) -> bool:
        """True where no process holds the whole model."""
        return self.strategy in ("fsdp", "zero3")


def choose_sharding(
    strategy: Strategy, *, offload: bool, group: int = 0, tensor_parallel: int = 1
) -> Sharding:
    """What the flags say; where they say nothing, what `accelerate launch` was configured with.

    Call it before the group is formed: accelerate's own switches are read and turned off here.

    Raises:
        ConfigError: one process cannot divide anything, offloading has nothing to offload, the
            processes do not make whole groups, or are not those that hold a model together.
    """
    wants_fsdp = os.environ.pop(ACCELERATE_FSDP, "false") == "true"
    wants_deepspeed = os.environ.pop(ACCELERATE_DEEPSPEED, "false") == "true"
    if tensor_parallel > 1:
        _require_all(tensor_parallel, configured=wants_fsdp or wants_deepspeed)
        return Sharding(tensor_parallel=tensor_parallel)
    if strategy == "none" and wants_fsdp:
        return _from_fsdp(FullyShardedDataParallelPlugin(), offload, group)
    if strategy == "none" and wants_deepspeed:
        return _from_deepspeed(DeepSpeedPlugin(), offload, group)
    sharding = Sharding(strategy, offload, group)
    if offload and not sharding.divides:
        raise ConfigError(
            f"--offload has no meaning with --sharding {strategy}",
            "Add --sharding fsdp, zero1, zero2 or zero3.",
        )
    if sharding.divides and "RANK" not in os.environ:
        raise ConfigError(
            f"--sharding {strategy} divides a training between processes, and there is only one",
            "Add --processes N, or start the command under torchrun.",
        )
    _require_whole_groups(sharding)
    if strategy == "fsdp" and offload:
        _let_main_memory_speak()
    return sharding


def _require_all(parts: int, *, configured: bool) -> None:
    if configured:
        raise ConfigError(
            f"--tensor-parallel {parts} has no meaning beside accelerate's FSDP or DeepSpeed",
            "Start the command with --processes, torchrun or a plain accelerate configuration.",
        )
    if world_size() != parts:
        raise ConfigError(
            f"--tensor-parallel {parts} needs {parts} processes, and there are {world_size()}",
            f"Give --processes {parts}, or as many in --tensor-parallel as there are.",
        )


def _require_whole_groups(sharding: Sharding) -> None:
    if not sharding.group:
        return
    if sharding.strategy != "fsdp":
        raise ConfigError(
            f"--shard-group has no meaning with --sharding {sharding.strategy}",
            "Add --sharding fsdp, or leave it out.",
        )
    if world_size() % sharding.group:
        raise ConfigError(
            f"--shard-group {sharding.group} does not divide the {world_size()} processes",
            "Give the processes of one machine, or another divisor of all.",
        )


def _let_main_memory_speak() -> None:
    """Form a group that sums tensors in main memory, such as offloaded gradients, too."""
    if torch.cuda.is_available() and not distributed.is_initialized():
        distributed.init_process_group("cuda:nccl,cpu:gloo", timeout=PATIENCE)


def _from_fsdp(plugin: FullyShardedDataParallelPlugin, offload: bool, group: int) -> Sharding:
    if plugin.fsdp_version != 2:
        raise ConfigError(
            f"accelerate is configured for FSDP {plugin.fsdp_version}",
            "Write fsdp_version: 2 into its configuration, or give --sharding fsdp.",
        )
    offload = offload or isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    sharding = Sharding("fsdp", offload, group, reshard=bool(plugin.reshard_after_forward))
    _require_whole_groups(sharding)
    if offload:
        _let_main_memory_speak()
    return sharding


def _from_deepspeed(plugin: DeepSpeedPlugin, offload: bool, group: int) -> Sharding:
    config = plugin.deepspeed_config
    stage = int(config["zero_optimization"]["stage"])
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"DeepSpeed is configured with ZeRO stage {stage}",
            "Use stage 1, 2 or 3, or --sharding ddp.",
        )
    if offload:
        raise ConfigError(
            "--offload has no meaning beside a DeepSpeed configuration",
            f"Write offload_optimizer into that, or give --sharding zero{stage}.",
        )
    strategies: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
    sharding = Sharding(strategies[stage], group=group, deepspeed=config)
    _require_whole_groups(sharding)
    return sharding


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, sharding: Sharding
) -> tuple[nn.Module, Optimizer]:
    """Spread a model and its optimizer over the group; use what comes back in their place.

    Raises:
        InputError: DeepSpeed is asked for and not installed.
    """
    if not sharding.divides:
        spread: tuple[nn.Module, Optimizer] = accelerator.prepare(model, optimizer)
        return spread
    autocast_forward(accelerator, model)
    if sharding.is_together:
        model.to(accelerator.device)
        hold_together(model, optimizer)
    elif sharding.strategy == "fsdp":  # moves a layer to the device at a time
        mesh = arrange(accelerator.device, accelerator.num_processes, sharding.group)
        shard(model, optimizer, sharding, mesh, bf16=accelerator.mixed_precision == "bf16")
    else:
        model.to(accelerator.device)
        model, optimizer = _initialize_deepspeed(model, optimizer, sharding)
    accelerator._models.append(model)  # where rlhf.checkpoint finds them
    accelerator._optimizers.append(optimizer)
    return model, optimizer


def _initialize_deepspeed(
    model: nn.Module, optimizer: Optimizer, sharding: Sharding
) -> tuple[nn.Module, Optimizer]:
    try:
        from rlhf import zero
    except ModuleNotFoundError:
        raise InputError(
            f"--sharding {sharding.strategy} needs DeepSpeed, which is not installed",
            "Install it: pip install deepspeed, or use --sharding fsdp.",
        ) from None
    return zero.prepare(model, optimizer, sharding.zero_stage, sharding.offload, sharding.deepspeed)


def autocast_forward(accelerator: Accelerator, model: nn.Module) -> None:
    """Let a model multiply in the accelerator's precision wherever it is called."""
    plain: Callable[..., Any] = model.forward
    # each weight is multiplied once, and copies of all of them would be those of the whole model
    no_copies = AutocastKwargs(cache_enabled=False)

    @wraps(plain)
    def forward(*inputs: Any, **named: Any) -> Any:
        with accelerator.autocast(no_copies):
            return plain(*inputs, **named)

    model.forward = forward


def arrange(device: torch.device, processes: int, group: int = 0) -> DeviceMesh:
    """Processes in one row that divides, or in rows of `group`: a row divides, columns hold copies.

    Neighbours, which are in one machine, come into one row.
    """
    if not group:
        return init_device_mesh(device.type, (processes,))
    sizes = (processes // group, group)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "parts"))


def shard(
    model: nn.Module, optimizer: Optimizer, sharding: Sharding, mesh: DeviceMesh, *, bf16: bool
) -> None:
    """Divide every layer, then what is left, and give the optimizer the divided parameters.

    With bf16, layers are gathered in bf16, as autocast would round their matrices; only the weights
    of their norms are rounded besides. Copies that autocast makes would outlive the gathering.
    """
    places = {parameter: name for name, parameter in model.named_parameters(remove_duplicate=False)}
    _divide(model, sharding, mesh, bf16=bf16)
    divided = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        group["params"] = [divided[places[parameter]] for parameter in group["params"]]


def shard_frozen(accelerator: Accelerator, model: nn.Module, sharding: Sharding) -> None:
    """Divide a model that is only asked; then all processes must ask it equally often."""
    mesh = arrange(accelerator.device, accelerator.num_processes, sharding.group)
    bf16 = accelerator.mixed_precision == "bf16"
    _divide(model, sharding, mesh, bf16=bf16, give_back=True)


def _divide(
    model: nn.Module,
    sharding: Sharding,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    give_back: bool | None = None,
) -> None:
    """Divide every layer, then what is left.

    The latter stays gathered between forward and backward pass unless told to `give_back`.
    """
    pinned = mesh.device_type != "cpu"
    policy = CPUOffloadPolicy(pin_memory=pinned) if sharding.offload else OffloadPolicy()
    rounding = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in find_layers(model):
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=sharding.reshard,
            offload_policy=policy,
            mp_policy=rounding if bf16 else MixedPrecisionPolicy(),
        )
    fully_shard(model, mesh=mesh, reshard_after_forward=give_back, offload_policy=policy)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of every language model inside: what transformers says must not be split."""
    names = {
        name
        for part in model.modules()
        for name in (getattr(part, "_no_split_modules", None) or ())
    }
    return [part for part in model.modules() if type(part).__name__ in names]


def unwrap(model: nn.Module) -> Any:
    """The module inside what `prepare` returned."""
    return model.module if is_zero(model) or isinstance(model, DistributedDataParallel) else model


def is_zero(model: nn.Module) -> bool:
    """True for a model that DeepSpeed drives."""
    return type(model).__name__ == "DeepSpeedEngine"


@contextmanager
def accumulating(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around the forward and backward of a micro-batch: only the last one of a step meets others.

    Where gradients are divided every micro-batch does, or each process would gather them whole.
    """
    if is_zero(model):
        engine: Any = model
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        yield
    elif last or isinstance(model, FSDPModule):
        yield
    else:
        with accelerator.no_sync(model):
            yield


def backward(accelerator: Accelerator, model: nn.Module, loss: Tensor) -> None:
    """Add a loss's gradients; over processes they are averaged under every strategy."""
    if is_zero(model):
        engine: Any = model
        engine.backward(loss)
    else:
        accelerator.backward(loss)


def clip_gradients(
    accelerator: Accelerator, model: nn.Module, parameters: Iterable[Tensor], max_norm: float
) -> float:
    """Scale the gradients of some of a model's parameters down to `max_norm`; their norm before."""
    if is_zero(model):
        from rlhf import zero

        return zero.clip_gradients(model, parameters, max_norm)
    parameters = list(parameters)
    if any(isinstance(one, DTensor) for one in parameters):
        with implicit_replication():  # of what tensor parallelism leaves whole
            norm = clip_grad_norm_(parameters, max_norm)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return float(accelerator.clip_grad_norm_(parameters, max_norm))


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Overwrite one parameter of a prepared model; all processes call it with the same value."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # what ZeRO 3 has divided shows none
    value = value.detach().view(shape)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = value.to(parameter.device, parameter.dtype)
        parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    elif hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from rlhf import zero

        zero.assign(parameter, value)
    else:
        parameter.copy_(value)
