"""`--parallel.tensor-parallel`: every process holds a part of each matrix of one model.

transformers splits embeddings and the matrices of layers while loading (its `tp_plan`) and sums
what the processes compute; norms and heads are replicated. All processes see the same batch, so
replicated weights get the same gradients everywhere but for rounding: attention's backward pass
adds up in any order on GPUs. `average_replicated` keeps the replicas from drifting apart.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from transformers import PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from rlhf.errors import InputError
from rlhf.ranks import world_size

SUMMED_AGAIN = "replicated_with_grad_allreduce"


def tensor_parallel_options(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """Options of `from_pretrained` with which each process loads its part of every matrix.

    Raises:
        InputError: transformers cannot split this model, or not over this many processes.
    """
    text: Any = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise InputError(
            f"transformers has no plan to split the matrices of {name} ({type(config).__name__})",
            "Leave --parallel.tensor-parallel out; each process then holds the model.",
        )
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if heads % world_size():
        raise InputError(
            f"{name} has {heads} key-value heads, which {world_size()} processes cannot split "
            "evenly",
            f"Use a number of processes that divides {heads}.",
        )
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def require_trainable_parts(name: str, config: PreTrainedConfig) -> None:
    """Refuse models with norms per attention head, whose gradients transformers sums repeatedly.

    Raises:
        InputError: the model has such norms.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    if SUMMED_AGAIN in plan.values():
        raise InputError(
            f"{name} ({type(config).__name__}) has norms within attention heads, whose gradients "
            "transformers sums incorrectly over several passes",
            "Leave --parallel.tensor-parallel out; --sharding fsdp also shards it.",
        )


def prepare_tensor_parallel(model: nn.Module, optimizer: Optimizer) -> None:
    """Split gradients as the weights are, and step split and replicated weights together."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_keep_part)  # type: ignore[no-untyped-call]
    plain = optimizer.step

    @wraps(plain)
    def step(*inputs: Any, **named: Any) -> Any:
        with implicit_replication():
            return plain(*inputs, **named)

    optimizer.step = step  # type: ignore[method-assign]


@torch.no_grad()
def average_replicated(parameters: Iterable[Tensor]) -> None:
    """Give all processes the mean of their gradients of weights that are not split."""
    whole = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and not isinstance(parameter, DTensor)
    ]
    if not whole:
        return
    flat = parameters_to_vector(whole)
    all_reduce(flat)
    vector_to_parameters(flat / get_world_size(), whole)


def _keep_part(parameter: Tensor) -> None:
    """Keep this process's part of a gradient: that of split embeddings comes whole."""
    gradient: Any = parameter.grad
    placements = parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        parameter.grad = gradient.redistribute(placements=placements)
