"""Training a model that all processes hold together, under `--tensor-parallel`.

transformers divides embeddings and the matrices of layers while it loads (its `tp_plan`) and adds
up what the processes compute; norms and heads are whole in each. All processes see the same batch,
so all that is whole gets the same gradients everywhere, and none needs an average.
"""

from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer


def hold_together(model: nn.Module, optimizer: Optimizer) -> None:
    """Let gradients be divided as weights are, and step divided weights and whole ones at once."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_keep_part)  # type: ignore[no-untyped-call]
    plain = optimizer.step

    @wraps(plain)
    def step(*inputs: Any, **named: Any) -> Any:
        with implicit_replication():
            return plain(*inputs, **named)

    optimizer.step = step  # type: ignore[method-assign]


def _keep_part(parameter: Tensor) -> None:
    """The gradient of divided embeddings comes whole."""
    gradient: Any = parameter.grad
    placements = parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        parameter.grad = gradient.redistribute(placements=placements)
