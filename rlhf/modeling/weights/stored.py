"""Models of which every process reads its part of each weight from the safetensors files.

No process holds such a model: its weights are on `meta` until FSDP shards them, and PyTorch's
`HuggingFaceStorageReader` then reads the rows of this process. The files must hold every weight as
the model has it, under the same name. Where they do not, the main process reads all weights and
sends them (`rlhf.modeling.weights.on_main`), and one line on stderr says why.
"""

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.modeling.heads import reads_pairs
from rlhf.modeling.weights.first_layers import LAYERS, find_lists
from rlhf.modeling.weights.on_main import Outline, names_of_weights, owner_of, read_on_main
from rlhf.modeling.weights.whole import HEAD, tensor_files
from rlhf.parallel.distributed import on_main
from rlhf.parallel.layers import ON_MAIN, STORED, Stored
from rlhf.parallel.waits import waiting
from rlhf.ranks import is_main_process, world_size
from rlhf.records.fingerprints import sampled_hash

Files = Mapping[str, Sequence[str]]  # that hold each tensor


@dataclass(frozen=True)
class _StoredModel:
    """A model of which every process can read its part, as the main process has found it.

    Attributes:
        outline: of the model.
        tensors: for each weight in the files, by one of its names, the name of its tensor.
        content: hash of samples of the files.
    """

    outline: Outline
    tensors: dict[str, str]
    content: str


def read_for_shards(
    name: str,
    kind: type[Any],
    config: PreTrainedConfig,
    read: Callable[[bool], PreTrainedModel],
    *,
    new_head: bool,
) -> PreTrainedModel:
    """A model to be sharded; until then its weights are in its files, or in the main process alone.

    All processes call this. A new head has zeros in the main process.

    Args:
        name: of the model.
        kind: its class, or an auto class.
        config: of the model.
        read: gives the model; called with true, without weights, on `meta`.
        new_head: whether the files lack the head.

    Raises:
        RlhfError: as `read`, in every process.
    """
    models: list[PreTrainedModel] = []

    def look() -> _StoredModel | str:
        """What is needed to read by parts, or why that cannot be done."""
        if obstacle := _find_obstacle_in_config(config):
            return obstacle
        model = read(True)
        models.append(model)
        files, unreadable = tensor_files(folder_of(name))
        incomplete = compute_buffers(model)
        if new_head:
            _start_new_head(model)
        obstacles = chain(
            (f"{file} cannot be read" for file in unreadable),
            obstacles_in_layers(model),
            _obstacles_in_files(model, files),
            (f"transformers does not compute {buffer}" for buffer in incomplete),
            _obstacles_in_tensors(model),
        )
        if obstacle := next(obstacles, ""):
            return obstacle
        return _StoredModel(Outline.of(model), _tensors(model, files), _content(name))

    outcome = on_main(look) if world_size() > 1 else "there is no other"
    if isinstance(outcome, _StoredModel):
        outcome = _find_difference(name, outcome.content) or outcome
    if isinstance(outcome, str):
        if is_main_process() and world_size() > 1:
            sys.stderr.write(f"The main process reads {name} and sends its weights: {outcome}.\n")
        return read_on_main(lambda: read(False), kind)
    model = models[0] if models else outcome.outline.build(kind)
    for weight, tensor in outcome.tensors.items():
        setattr(model.get_parameter(weight), STORED, Stored(folder_of(name), tensor))
    setattr(model, ON_MAIN, True)
    return model


def folder_of(name: str) -> Path:
    """A model's folder; of a model on the hub that in the cache, if it is there."""
    cached = None if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else Path(name)


def _content(name: str) -> str:
    return sampled_hash(folder_of(name), ("*.safetensors",))


def _find_difference(name: str, content: str) -> str:
    """Name a process that sees other files than the main one; empty if none does."""
    with waiting("ranks"):
        everyone = gather_object([(socket.gethostname(), _content(name))])
    for number, (host, other_content) in enumerate(everyone):
        if other_content != content:
            return f"rank {number} ({host}) has other files of it"
    return ""


def compute_buffers(model: PreTrainedModel) -> list[str]:
    """Give buffers on `meta` that no file holds the values that transformers computes.

    Returns:
        the names of buffers that it does not compute, which keep whatever was in memory.
    """
    stored = set(model.state_dict())
    outlines = {name: buffer for name, buffer in model.named_buffers() if name not in stored}
    computed: list[dict[str, Tensor]] = []
    for filling in (0, 1):
        for name, outline in outlines.items():
            part, leaf = owner_of(model, name)
            part._buffers[leaf] = torch.full_like(outline, filling, device="cpu")
            part._is_hf_initialized = False  # type: ignore[assignment]
        model.initialize_weights()
        computed.append({name: model.get_buffer(name) for name in outlines})
    first, second = computed
    return [name for name in outlines if not torch.equal(first[name], second[name])]


def _tensors(model: PreTrainedModel, files: Files) -> dict[str, str]:
    return {
        names[0]: name
        for names in names_of_weights(model).values()
        for name in names
        if name in files
    }


def _start_new_head(model: PreTrainedModel) -> None:
    for name, weight in list(model.named_parameters()):
        if name.startswith(HEAD):
            part, leaf = owner_of(model, name)
            part._parameters[leaf] = nn.Parameter(torch.zeros_like(weight, device="cpu"))


def _find_obstacle_in_config(config: PreTrainedConfig) -> str:
    if getattr(config, "quantization_config", None):
        return "they are quantized"
    return "an encoder is tried whole before it is trained" if reads_pairs(config) else ""


def obstacles_in_layers(model: PreTrainedModel) -> Iterator[str]:
    """Why packed rows cannot be tried with the first layers."""
    lists = find_lists(model)
    if len(lists) != 1:
        yield "its layers are not in one list"
        return
    kinds = [_structure(layer) for layer in lists[0]]
    if not set(kinds) <= set(kinds[:LAYERS]):
        yield f"packed rows are tried with {LAYERS} layers, and others differ from these"


def _structure(layer: nn.Module) -> tuple[tuple[str, type[nn.Module]], ...]:
    """The modules inside a layer, by name."""
    return tuple((name, type(part)) for name, part in layer.named_modules())


def _obstacles_in_files(model: PreTrainedModel, files: Files) -> Iterator[str]:
    """Why files do not hold the weights as the model has them."""
    if getattr(model, "_weight_conversions", None):
        yield "transformers converts them while loading"
    for pair in model.all_tied_weights_keys.items():
        if files.keys() >= set(pair):
            yield f"its files hold {' and '.join(pair)}, which its config ties"
    for weight, names in names_of_weights(model).items():
        file_names = [file for name in names for file in files.get(name, ())]
        if weight.is_meta and len(file_names) != 1:
            yield f"{names[0]} is in {' and '.join(file_names) or 'no safetensors file'}"


def _obstacles_in_tensors(model: PreTrainedModel) -> Iterator[str]:
    """Tensors without values that are not weights."""
    for name, part in model.named_modules():
        for leaf, value in (*part._buffers.items(), *vars(part).items()):
            if isinstance(value, Tensor) and value.is_meta:
                yield f"transformers does not compute {name}.{leaf}"
