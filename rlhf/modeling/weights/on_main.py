"""A model that the main process alone reads; others have its modules without weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.parallel.distributed import on_main
from rlhf.parallel.layers import ON_MAIN


def read_on_main(read: Callable[[], PreTrainedModel], kind: type[Any]) -> PreTrainedModel:
    """The model in the main process; in others the same modules, whose weights are on `meta`.

    All processes call this. Other tensors of the modules, such as buffers, are the main one's.

    Args:
        read: gives the model.
        kind: of the model: its class, or an auto class.

    Raises:
        RlhfError: as `read`, in every process.
    """
    models: list[PreTrainedModel] = []

    def outline() -> Outline:
        models.append(read())
        return Outline.of(models[0])

    model_outline = on_main(outline)
    model = models[0] if models else model_outline.build(kind)
    setattr(model, ON_MAIN, True)
    return model


@dataclass(frozen=True)
class Outline:
    """A model without its weights.

    Attributes:
        config: of the model, as loaded.
        generation: its generation config, if it has one.
        weights: names of each weight, several where it is tied; and the weight, on `meta`.
        buffers: by name.
        others: tensors that modules hold as plain attributes, by module and name.
    """

    config: PreTrainedConfig
    generation: Any
    weights: list[tuple[list[str], Tensor]]
    buffers: dict[str, Tensor]
    others: dict[tuple[str, str], Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The outline of a model."""
        others = {
            (part_name, name): value
            for part_name, part in model.named_modules()
            for name, value in vars(part).items()
            if isinstance(value, Tensor)
        }
        return cls(
            model.config,
            getattr(model, "generation_config", None),
            [
                (of_one, value.detach().to("meta"))
                for value, of_one in names_of_weights(model).items()
            ],
            dict(model.named_buffers()),
            others,
        )

    def build(self, kind: type[Any]) -> PreTrainedModel:
        """The model, with its weights on `meta`; `kind` as in `read_on_main`."""
        make = getattr(kind, "from_config", None) or kind._from_config
        with torch.device("meta"):
            model: PreTrainedModel = make(self.config, dtype=torch.float32)
        if self.generation is not None:
            model.generation_config = self.generation
        for names, value in self.weights:
            weight = nn.Parameter(value)
            for part, leaf in (owner_of(model, name) for name in names):
                part._parameters[leaf] = weight
        for name, value in self.buffers.items():
            part, leaf = owner_of(model, name)
            part._buffers[leaf] = value
        for (part_name, name), value in self.others.items():
            setattr(model.get_submodule(part_name), name, value)
        model.eval()
        return model


def names_of_weights(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each weight with its names: several where it is tied.

    Which are tied depends on the files that a model was loaded from, not only on its config.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return names


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a tensor, and the tensor's name in it."""
    part_name, _, leaf = name.rpartition(".")
    return model.get_submodule(part_name), leaf
