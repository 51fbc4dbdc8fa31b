"""bf16 weights with float32 masters: `--precision bf16-weights` where no process shards weights.

Forward and backward pass read bf16 weights and write bf16 gradients. AdamW steps the float32
masters, in the form of Micikevicius et al. (arXiv 1710.03740, section 3.1) without loss scaling:

    master ← AdamW(master, float32(gradient)),   weight ← bf16(master)

A bf16 number has 8 significant bits: steps below 1/512 of a weight, which most are, would be
rounded away without masters. Differs from that paper: gradients are bf16, not fp16. What is read as
a number and not only multiplied, as heads are, stays float32 and is its own master.

Under FSDP the sharded weights are the masters, and FSDP itself gathers them in bf16.
"""

import copy
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def rounded_weights(model: nn.Module, fp32_modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The trained weights that work in bf16: all but those of `fp32_modules`."""
    fp32_ids = {id(parameter) for part in fp32_modules for parameter in part.parameters()}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and id(parameter) not in fp32_ids
    ]


@final
class MasterOptimizer(Optimizer):
    """Rounds a model's weights to bf16 and lets an optimizer step their float32 masters.

    `masters` is a module like `model` that holds the masters and is never called: what it and
    `optimizer` hold is saved, in the form of a float32 training. Weights that need no rounding,
    and buffers, are one and the same in both modules.

    Args:
        optimizer: of the model's weights; it has no state yet.
        model: a float32 model on its device.
        fp32_modules: those whose weights stay float32.
    """

    # no super().__init__: the groups are the optimizer's
    def __init__(
        self, optimizer: Optimizer, model: nn.Module, fp32_modules: Iterable[nn.Module]
    ) -> None:
        rounded = rounded_weights(model, fp32_modules)
        masters = {id(weight): nn.Parameter(weight.data) for weight in rounded}
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.optimizer = optimizer
        self.masters: nn.Module = copy.deepcopy(model, {**shared, **masters})
        self._model = model
        self._weights: dict[Tensor, nn.Parameter] = {
            masters[id(weight)]: weight for weight in rounded
        }
        for group in optimizer.param_groups:
            group["params"] = [
                masters.get(id(parameter), parameter) for parameter in group["params"]
            ]
        for weight in rounded:
            weight.data = weight.data.bfloat16()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups whose learning rates are used; they hold the masters."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the masters one by one, so that float32 gradients of only one exist at a time."""
        groups = self.optimizer.param_groups
        for group in groups:
            for master in group["params"]:
                weight = self._weights.get(master)
                if weight is not None and weight.grad is not None:
                    master.grad = weight.grad.float()
                self.optimizer.param_groups = [{**group, "params": [master]}]
                self.optimizer.step()
                if weight is not None:
                    master.grad = None
                    weight.copy_(master)
        self.optimizer.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's weights."""
        self._model.zero_grad(set_to_none)

    @torch.no_grad()
    def round_again(self) -> None:
        """Give the weights the values of masters that have been loaded."""
        for master, weight in self._weights.items():
            weight.copy_(master)


def float32_model(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Of what `prepare` returned, the module with float32 weights: the one to save."""
    return optimizer.masters if isinstance(optimizer, MasterOptimizer) else model
