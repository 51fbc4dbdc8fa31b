"""The output projection in float32, where the layers below multiply in bf16.

A bf16 logit between 16 and 32 is a multiple of 1/8, so log-probs of one response in two batches
differ by more than a PPO step changes them. Here sums and logits are float32. The factors are
float32 on CPUs, where those that multiply bf16 may round them; on CUDA they are bf16, which adds no
more rounding than any layer before.

Letters: N positions, d hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

WEIGHT_ROWS = 8192  # vocabulary entries whose 16-bit weights are cast to float32 at one time


@contextmanager
def float32_logits(model: PreTrainedModel | nn.Module, *, frozen: bool = False) -> Iterator[None]:
    """Within this context `model` returns float32 logits.

    Changes nothing where the projection runs in float32 already, and for output modules that are
    not plain linear layers, such as 4-bit ones.

    Args:
        model: a language model.
        frozen: the weights stay as they are within the context, which has many passes: a copy of
            the output matrix in the precision of its factors is kept.
    """
    output = linear_output(model)
    if output is None:
        yield
        return
    plain = output.forward
    held: list[Tensor] = []

    def project(hidden: Tensor) -> Tensor:
        dtype = factor_dtype(hidden, output.weight)
        if dtype == torch.float32:
            unchanged: Tensor = plain(hidden)
            return unchanged
        with torch.autocast(hidden.device.type, enabled=False):
            factors = dtype if hidden.is_cuda else torch.float32
            if frozen and not held and output.weight.dtype != factors:
                held.append(output.weight.detach().to(factors))
            weight = held[0] if held else output.weight
            if hidden.is_cuda:
                hidden, weight = hidden.to(dtype), weight.to(dtype)
            logits = _project(hidden, weight)
            return logits if output.bias is None else logits + output.bias.float()

    with replaced_forward(output, project):
        yield


def linear_output(model: PreTrainedModel | nn.Module) -> Any:
    """The model's output layer; None where it is not a plain linear layer."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    return layer if type(layer) is nn.Linear else None


@contextmanager
def replaced_forward(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within this context `module` computes `forward`; its hooks run as before."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def factor_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The precision in which hidden states and weights would be multiplied."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return weight.dtype


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, DTensor):  # a part of the vocabulary in each process
        return nn.functional.linear(hidden.float(), weight.float())
    function: Any = _Projection.apply  # torch leaves it untyped
    logits: Tensor = function(hidden, weight)
    return logits


class _Projection(torch.autograd.Function):
    """z = h Wᵀ in float32; with 16-bit weights, gradients are multiplied in 16 bits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        flat = hidden.flatten(0, -2)
        return float32_product(flat, weight).view(*hidden.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        with _bf16_allowed():
            for_hidden = gradient @ weight if ctx.needs_input_grad[0] else None
            if not ctx.needs_input_grad[1]:
                return for_hidden, None
            factors = hidden.to(weight.dtype).flatten(0, -2)
            return for_hidden, gradient.flatten(0, -2).T @ factors


def float32_product(
    hidden: Float[Tensor, "N d"], weight: Float[Tensor, "V d"]
) -> Float[Tensor, "N V"]:
    """The product h Wᵀ in float32, of factors of 16 bits (on CUDA) or of 16 or 32 bits."""
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    wide = hidden.float()
    with _bf16_allowed():
        if weight.dtype == torch.float32:
            return wide @ weight.T
        result = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
        for first in range(0, len(weight), WEIGHT_ROWS):
            part = weight[first : first + WEIGHT_ROWS]
            torch.mm(wide, part.float().T, out=result[:, first : first + len(part)])
    return result


def float32_block(
    hidden: Float[Tensor, "N d"], weight: Float[Tensor, "v d"], dtype: torch.dtype, out: Tensor
) -> None:
    """Write the product h Wᵀ into `out` in float32.

    Args:
        hidden: in `dtype` on CUDA, float32 on CPUs.
        weight: some rows of the output matrix.
        dtype: float32 for exact factors; otherwise factors may be rounded to these 16 bits.
        out: float32, N × v.
    """
    if dtype == torch.float32:
        torch.mm(hidden, weight.float().T, out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.to(dtype).T, out_dtype=torch.float32, out=out)
    else:
        with _bf16_allowed():
            torch.mm(hidden, weight.float().T, out=out)


@contextmanager
def _bf16_allowed() -> Iterator[None]:
    """Let a CPU that multiplies bf16 round float32 factors to it; sums stay float32."""
    backends: Any = torch.backends.mkldnn
    matmul = backends.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
