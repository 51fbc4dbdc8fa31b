"""The first layers of a model whose weights are still in its files, to try it."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf.modeling.weights.on_main import owner_of
from rlhf.parallel.layers import find_layers, read_stored, stored_at

LAYERS = 2


def first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose trunk has only its first two layers, with weights; or the model if it has them.

    The weights of the copy are float32 and in main memory.

    Raises:
        InputError: a weight cannot be read.
    """
    names = {
        name: stored
        for name, parameter in model.base_model.named_parameters()
        if (stored := stored_at(parameter))
    }
    if not names:
        return model
    short = copy.deepcopy(model)
    (layers,) = find_lists(short)
    del layers[LAYERS:]
    trunk, wanted = short.base_model, []
    for name, outline in list(trunk.named_parameters()):
        if name in names:
            part, leaf = owner_of(trunk, name)
            weight = nn.Parameter(
                torch.empty_like(outline, dtype=torch.float32, device="cpu"), requires_grad=False
            )
            part._parameters[leaf] = weight
            wanted.append((names[name], weight))
    read_stored(wanted, alone=True)
    return short


def find_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The lists that hold a model's layers."""
    layers = set(find_layers(model))
    return [
        part for part in model.modules() if isinstance(part, nn.ModuleList) and layers & set(part)
    ]
