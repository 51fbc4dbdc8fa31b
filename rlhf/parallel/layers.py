"""The parts of a model that FSDP shards one by one, and where their weights come from.

Weights are on `meta` until they are sharded. Then every process reads its part from the files, or
the main process, which has read all, sends them.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import broadcast, get_rank
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils import swap_tensors
from transformers import PreTrainedModel

from rlhf.errors import InputError

ON_MAIN = "_weights_on_main"  # an attribute of models of which other processes lack weights
STORED = "_stored"  # an attribute of weights that are still in files: where


@dataclass(frozen=True)
class Stored:
    """Where a weight is: the tensor `name` of the safetensors files in `folder`."""

    folder: Path
    name: str


def stored_at(weight: Tensor) -> Stored | None:
    """Where a weight is that is still in files; None for any other."""
    stored: Stored | None = getattr(weight, STORED, None)
    return stored


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Within the block, weights that are still in files seem to be in main memory.

    What stands in for them has their shape and a single number.
    """
    held = [
        (part, name, weight)
        for part in model.modules()
        for name, weight in part._parameters.items()
        if weight is not None and stored_at(weight)
    ]
    for part, name, weight in held:
        stand_in = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        part._parameters[name] = nn.Parameter(stand_in, requires_grad=weight.requires_grad)
    try:
        yield
    finally:
        for part, name, weight in held:
            weight.requires_grad_(part.get_parameter(name).requires_grad)
            part._parameters[name] = weight


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


def allocate(parameter: nn.Parameter, device: str, stored: Stored) -> None:
    """Give a parameter on `meta` storage of its own, in place; `load_own_shards` will fill it."""
    value = torch.empty_like(parameter, device=device)
    swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    setattr(parameter, STORED, stored)


def load_own_shards(weights: Iterable[Tensor]) -> None:
    """Fill the weights that are still in files: of a sharded one only this process's part.

    All processes call this with the same weights.

    Raises:
        InputError: a process cannot read a weight; in every process.
    """
    wanted = [(stored, weight) for weight in weights if (stored := stored_at(weight))]
    read_stored(wanted)
    for _, weight in wanted:
        delattr(weight, STORED)


def read_stored(weights: Iterable[tuple[Stored, Tensor]], *, alone: bool = False) -> None:
    """Fill tensors from files, converting them to their precision.

    All processes call this for the same names, unless one does so `alone`.

    Raises:
        InputError: a tensor cannot be read, or has another shape; in every process.
    """
    rounds: dict[tuple[Path, int], dict[str, Tensor]] = {}
    times: Counter[Stored] = Counter()  # policy and critic may be in the same files
    for stored, weight in weights:
        rounds.setdefault((stored.folder, times[stored]), {})[stored.name] = weight
        times[stored] += 1
    for (folder, _), named in rounds.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load(named, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise InputError(
                f"Rank {rank} cannot read its part of the weights in {folder} ({cause})",
                "Copy or download the model again, and leave it as it is while it is read.",
            ) from None


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
    matrices: list[nn.Module] = []
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part.base_model is part:
            continue
        embeddings, output = part.get_input_embeddings(), part.get_output_embeddings()
        if output is None:
            matrices.append(embeddings)
        elif output.weight is not embeddings.weight:
            matrices += [embeddings, output]
    return matrices
