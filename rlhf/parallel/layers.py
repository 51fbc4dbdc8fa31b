"""The parts of a model that FSDP shards one by one, and their weights from the main process."""

import torch
from torch import nn
from torch.distributed import broadcast, get_rank
from torch.utils import swap_tensors
from transformers import PreTrainedModel

ON_MAIN = "_weights_on_main"  # an attribute of models of which only the main process has weights


@torch.no_grad()
def take_from_main(parameter: nn.Parameter, device: str) -> None:
    """Give a parameter the values that it has in the main process, in place."""
    if get_rank() == 0:
        broadcast(parameter.detach().to(device), 0)
        return
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    broadcast(value, 0)
    if parameter.is_meta:
        wants = parameter.requires_grad
        swap_tensors(parameter, nn.Parameter(value, requires_grad=wants))
    else:
        parameter.copy_(value)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of every language model inside: the modules that must not be split."""
    names = {
        name
        for part in model.modules()
        for name in (getattr(part, "_no_split_modules", None) or ())
    }
    return [part for part in model.modules() if type(part).__name__ in names]


def find_matrices(model: nn.Module) -> list[nn.Module]:
    """Embeddings and output matrix of every language model inside; none where they are one."""
    found: list[nn.Module] = []
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part.base_model is part:
            continue
        embeddings, output = part.get_input_embeddings(), part.get_output_embeddings()
        if output is None:
            found.append(embeddings)
        elif output.weight is not embeddings.weight:
            found += [embeddings, output]
    return found
