"""Shards a training over the processes of its group as `--sharding` says.

    auto    as `accelerate launch` was configured, else ddp
    ddp     replicated: every process holds everything, gradients are averaged
    fsdp    weights, gradients and optimizer state are sharded (PyTorch's FSDP2)
    zero1   DeepSpeed: optimizer state is sharded
    zero2   … and gradients
    zero3   … and weights

With `--parallel.tensor-parallel` each process holds a part of every matrix instead: transformers
splits the matrices while loading, every process sees the same batch, and gradients are not
averaged.

Weights are float32 under every strategy and autocast multiplies in bf16, so all of them give the
losses of a single process. With `--precision bf16-weights` all but heads work in bf16: FSDP gathers
them so, elsewhere `rlhf.parallel.master_weights` keeps float32 masters. accelerate only forms the
group: its own FSDP2 and DeepSpeed integrations step the optimizer inside `backward` and refuse
machines without GPUs, where these paths are tested.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim import Optimizer

from rlhf.errors import ConfigError, InputError
from rlhf.parallel.distributed import extend_timeouts, global_max, global_sum
from rlhf.parallel.fsdp import make_mesh, shard_all, shard_parts
from rlhf.parallel.master_weights import MasterOptimizer
from rlhf.parallel.settings import SHARDED, MemoryKind, ReduceDtype, Strategy
from rlhf.parallel.tensor_parallel import average_replicated, prepare_tensor_parallel

Value = TypeVar("Value")
Held = Literal["whole", "parts", "files"]  # in every process; of matrices; not until sharded


@dataclass(frozen=True)
class Sharding:
    """How a training is sharded.

    Attributes:
        strategy: what is sharded.
        offload: what is sharded is kept in main memory.
        group: processes that shard one copy; each such group holds a copy. 0: all processes.
        reshard: layers are freed after the forward pass and gathered again for the backward pass.
        deepspeed: the user's own DeepSpeed configuration.
        tensor_parallel: processes over which every matrix is split: all processes, or 1.
        reduce_dtype: precision in which ddp and fsdp add up gradients over processes.
    """

    strategy: Strategy = "auto"
    offload: bool = False
    group: int = 0
    reshard: bool = True
    deepspeed: dict[str, Any] = field(default_factory=dict)
    tensor_parallel: int = 1
    reduce_dtype: ReduceDtype = "fp32"

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage; 0 without DeepSpeed."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @property
    def is_sharded(self) -> bool:
        """True where no process holds the whole training state."""
        return bool(SHARDED[self.strategy]) or self.is_tensor_parallel

    @property
    def is_tensor_parallel(self) -> bool:
        """True where every process holds a part of every matrix and sees the same batch."""
        return self.tensor_parallel > 1

    @property
    def shards_weights(self) -> bool:
        """True where no process holds the whole model."""
        return MemoryKind.WEIGHTS in SHARDED[self.strategy]

    def held(self, *, trained: bool) -> Held:
        """Who holds a model's weights between loading and `prepare` or `shard_frozen`.

        FSDP, which also shards frozen models under ZeRO 3, takes them from the files, else from
        the main process.
        """
        if self.is_tensor_parallel:
            return "parts"
        is_fsdp = self.strategy == "fsdp" or (self.shards_weights and not trained)
        return "files" if is_fsdp else "whole"

    def equal_calls(
        self, accelerator: Accelerator, parts: Sequence[Value], spare: Sequence[Value] = ()
    ) -> list[tuple[Value, bool]]:
        """This process's parts of some work; with sharded weights, equally many in every process.

        All processes must call a sharded model equally often: those with fewer parts repeat their
        last one, and a process without any gets `spare`.

        Returns:
            Each part, and whether it is one of `parts`: a repeated one only keeps processes in
            step.
        """
        own = [(part, True) for part in parts]
        if not self.shards_weights:
            return own
        most = int(global_max(accelerator, len(parts)))
        again = list(parts[-1:]) or list(spare)
        assert again or not most
        return [*own, *((part, False) for part in again * (most - len(parts)))]


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    sharding: Sharding,
    *,
    bf16_weights: bool = False,
    fp32_modules: Sequence[nn.Module] = (),
) -> tuple[nn.Module, Optimizer]:
    """Shard or replicate a model and its optimizer over the group; use the returned ones instead.

    With `bf16_weights` all weights but those of `fp32_modules` work in bf16.

    Raises:
        InputError: DeepSpeed is asked for and not installed.
        ConfigError: DeepSpeed is to train bf16 weights.
    """
    if not sharding.is_sharded:
        if bf16_weights:
            optimizer = MasterOptimizer(optimizer, model.to(accelerator.device), fp32_modules)
            accelerator._optimizers.append(optimizer)  # where rlhf.run.checkpoint finds it
            model = accelerator.prepare(model)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        if sharding.reduce_dtype == "bf16":
            assert isinstance(model, DistributedDataParallel)
            model.register_comm_hook(None, _add_up_in_bf16)
        return model, optimizer
    if bf16_weights and sharding.strategy != "fsdp":
        raise ConfigError(
            f"--precision bf16-weights cannot be combined with --sharding {sharding.strategy}",
            "Use --sharding fsdp or ddp, or --precision bf16.",
        )
    autocast_forward(accelerator, model)
    if sharding.is_tensor_parallel:
        model.to(accelerator.device)
        prepare_tensor_parallel(model, optimizer)
    elif sharding.strategy == "fsdp":  # moves a layer to the device at a time
        mesh = _mesh_of(model) or _arrange(accelerator, sharding)
        shard(
            model,
            optimizer,
            sharding,
            mesh,
            bf16=accelerator.mixed_precision == "bf16",
            bf16_weights=bf16_weights,
            fp32_modules=fp32_modules,
        )
    else:
        model.to(accelerator.device)
        model, optimizer = _initialize_deepspeed(model, optimizer, sharding)
    accelerator._models.append(model)  # where rlhf.run.checkpoint finds them
    accelerator._optimizers.append(optimizer)
    return model, optimizer


def shard_first(
    accelerator: Accelerator, model: nn.Module, sharding: Sharding, *, bf16_weights: bool
) -> None:
    """Under FSDP, shard a model before others are loaded, so that it is whole no longer.

    `prepare` of a module that contains it shards what is neither in a layer nor a matrix. With
    `bf16_weights` all weights work in bf16.
    """
    if sharding.strategy != "fsdp":
        return
    bf16, mesh = accelerator.mixed_precision == "bf16", _arrange(accelerator, sharding)
    shard_parts(model, sharding, mesh, bf16=bf16, bf16_weights=bf16_weights)


def _arrange(accelerator: Accelerator, sharding: Sharding) -> DeviceMesh:
    return make_mesh(accelerator.device, accelerator.num_processes, sharding.group)


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which a part of the model is sharded already."""
    sharded = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return next((parameter.device_mesh for parameter in sharded), None)


def _add_up_in_bf16(group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """PyTorch's hook, under a name that it does not refuse: gloo adds up bf16, too."""
    return bf16_compress_hook(group, bucket)  # type: ignore[arg-type]


def _initialize_deepspeed(
    model: nn.Module, optimizer: Optimizer, sharding: Sharding
) -> tuple[nn.Module, Optimizer]:
    try:
        from rlhf.parallel import zero
    except ModuleNotFoundError:
        raise InputError(
            f"--sharding {sharding.strategy} needs DeepSpeed, which is not installed",
            "Install it: pip install deepspeed, or use --sharding fsdp.",
        ) from None
    prepared = zero.prepare(
        model, optimizer, sharding.zero_stage, sharding.offload, sharding.deepspeed
    )
    extend_timeouts()
    return prepared


def autocast_forward(accelerator: Accelerator, model: nn.Module) -> None:
    """Let a model multiply in the accelerator's precision wherever it is called."""
    plain: Callable[..., Any] = model.forward
    # each weight is multiplied once: cached bf16 copies would add up to the whole model
    no_copies = AutocastKwargs(cache_enabled=False)

    @wraps(plain)
    def forward(*inputs: Any, **named: Any) -> Any:
        with accelerator.autocast(no_copies):
            return plain(*inputs, **named)

    model.forward = forward


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    sharding: Sharding,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    bf16_weights: bool = False,
    fp32_modules: Sequence[nn.Module] = (),
) -> None:
    """Shard every layer, then the rest, and give the optimizer the sharded parameters.

    With `bf16`, layers are gathered in bf16, as autocast would round their matrices; only the
    weights of their norms are rounded in addition. Copies made by autocast would outlive the
    gathering.
    With `bf16_weights` everything but `fp32_modules` is.
    """
    names = {parameter: name for name, parameter in model.named_parameters(remove_duplicate=False)}
    shard_all(
        model, sharding, mesh, bf16=bf16, bf16_weights=bf16_weights, fp32_modules=fp32_modules
    )
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[parameter]] for parameter in group["params"]]


def shard_frozen(
    accelerator: Accelerator, model: nn.Module, sharding: Sharding, *, exact: bool = False
) -> None:
    """Shard a frozen model where the strategy shards weights, else only move it to the device.

    All processes must call a sharded one equally often. With bf16 its layers are gathered in bf16,
    which rounds the weights of norms; `exact` keeps their own precision.
    """
    if not sharding.shards_weights:
        model.to(accelerator.device)
        return
    mesh = _arrange(accelerator, sharding)
    model.requires_grad_(False)  # autocast would keep copies of weights that want gradients
    bf16 = accelerator.mixed_precision == "bf16" and not exact
    shard_all(model, sharding, mesh, bf16=bf16, free_rest=True)


def unwrap(model: nn.Module) -> Any:
    """The module inside what `prepare` returned."""
    return model.module if is_zero(model) or isinstance(model, DistributedDataParallel) else model


def is_zero(model: nn.Module) -> bool:
    """True for a model that DeepSpeed has prepared."""
    return type(model).__name__ == "DeepSpeedEngine"


@contextmanager
def accumulating(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of a micro-batch: only the last of a step averages gradients.

    Where gradients are sharded every micro-batch does, or each process would hold them all.
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
    """Add a loss's gradients, averaged over processes under every strategy."""
    wait_for_slower(accelerator, model)
    if is_zero(model):
        engine: Any = model
        engine.backward(loss)
    else:
        accelerator.backward(loss)


def wait_for_slower(accelerator: Accelerator, model: nn.Module) -> None:
    """Before the backward pass in which DDP averages gradients, wait until all processes are there.

    DDP would wait for them within this pass, where nothing says for how long. Call it before every
    backward pass; in those that only accumulate it does nothing.
    """
    if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
        global_sum(accelerator, 0.0)


def clear_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """Forget all gradients after a step.

    DDP's stay views of its buckets, filled with zeros: freed ones would be held a second time while
    micro-batches accumulate.
    """
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


def clip_gradients(
    accelerator: Accelerator, model: nn.Module, parameters: Iterable[Tensor], max_norm: float
) -> float:
    """Clip the gradients of some parameters to `max_norm`; returns the norm before clipping."""
    if is_zero(model):
        from rlhf.parallel import zero

        return zero.clip_gradients(model, parameters, max_norm)
    parameters = list(parameters)
    if any(parameter.dtype == torch.bfloat16 for parameter in parameters):
        return _clip_rounded(parameters, max_norm)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if not isinstance(model, FSDPModule):
            average_replicated(parameters)
        with implicit_replication():  # of what tensor parallelism leaves whole
            norm = clip_grad_norm_(parameters, max_norm)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return float(accelerator.clip_grad_norm_(parameters, max_norm))


def _clip_rounded(parameters: list[Tensor], max_norm: float) -> float:
    """`clip_gradients` of bf16 gradients: their norm is summed up in float32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def reshard(model: nn.Module) -> None:
    """Free what FSDP's root leaves gathered after a forward pass without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Overwrite one parameter of a prepared model; all processes call it with the same value.

    Call `reshard` first after a forward pass: FSDP discards changes to gathered weights.
    """
    shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 `shape` is empty
    value = value.detach().view(shape)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = value.to(parameter.device, parameter.dtype)
        parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    elif hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from rlhf.parallel import zero

        zero.assign(parameter, value)
    else:
        parameter.copy_(value)
