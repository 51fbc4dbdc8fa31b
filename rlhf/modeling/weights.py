"""Reads weights, and refuses files that do not match the model's config exactly.

`transformers` only logs that it initializes missing weights at random and ignores unknown ones; the
results of such a model look like any others.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError
from rlhf.parallel.distributed import on_main
from rlhf.parallel.layers import ON_MAIN
from rlhf.ranks import is_main_process

COPY_AGAIN = "Copy or download the model again: its folder must hold whole *.safetensors files."
ADAPTER = "adapter_config.json"
HEAD = "score."
OUTPUT = ("lm_head.", "embed_out.")  # the output matrix of language models
NAMES_SHOWN = 3
QUANTIZED_BY = "compressed-tensors"  # the format of `rlhf quantize`, which vLLM reads too

Mismatch = tuple[str, Collection[int], Collection[int]]


def load_weights(
    kind: type[Any], name: str, *, new_head: bool = False, **settings: Any
) -> PreTrainedModel:
    """Load a model with all its weights.

    With `new_head` a language model gets the head of a reward model in place of its output matrix,
    and stderr says so. `settings` are those of `from_pretrained`, with a config. Weights that
    `rlhf quantize` wrote are expanded.

    Raises:
        InputError: the weights cannot be read, or are not those that the config describes.
    """
    if (Path(name) / ADAPTER).is_file():
        raise InputError(
            f"{name} holds an adapter ({ADAPTER}), which needs the weights of another folder",
            "Merge it first (peft: merge_and_unload, then save_pretrained), and give the result.",
        )
    if stored := quantization_of(settings["config"]):
        settings["config"].quantization_config = {**stored, "dequantize": True}
    with as_input_error(f"Cannot load the weights of {name}", COPY_AGAIN):
        model, found = kind.from_pretrained(
            name,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **settings,
        )
    missing, unexpected = found["missing_keys"], found["unexpected_keys"]
    if new_head:
        head = sorted(one for one in missing if one.startswith(HEAD))
        missing = missing - set(head)
        unexpected = {one for one in unexpected if not one.startswith(OUTPUT)}
        if head and is_main_process():
            sys.stderr.write(f"{name} has no reward head: {', '.join(head)} is new.\n")
    require_whole(name, "config.json", missing, unexpected, found["mismatched_keys"])
    return model  # type: ignore[no-any-return]


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

    def outline() -> _Outline:
        models.append(read())
        return _Outline.of(models[0])

    found = on_main(outline)
    model = models[0] if models else found.build(kind)
    setattr(model, ON_MAIN, True)
    return model


@dataclass(frozen=True)
class _Outline:
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
        # which are tied depends on the files, not only on the config
        names: dict[nn.Parameter, list[str]] = {}
        for name, value in model.named_parameters(remove_duplicate=False):
            names.setdefault(value, []).append(name)
        others = {
            (place, name): value
            for place, part in model.named_modules()
            for name, value in vars(part).items()
            if isinstance(value, Tensor)
        }
        return cls(
            model.config,
            getattr(model, "generation_config", None),
            [(of_one, value.detach().to("meta")) for value, of_one in names.items()],
            dict(model.named_buffers()),
            others,
        )

    def build(self, kind: type[Any]) -> PreTrainedModel:
        make = getattr(kind, "from_config", None) or kind._from_config
        with torch.device("meta"):
            model: PreTrainedModel = make(self.config, dtype=torch.float32)
        if self.generation is not None:
            model.generation_config = self.generation
        for names, value in self.weights:
            weight = nn.Parameter(value)
            for part, leaf in (_place(model, name) for name in names):
                part._parameters[leaf] = weight
        for name, value in self.buffers.items():
            part, leaf = _place(model, name)
            part._buffers[leaf] = value
        for (place, name), value in self.others.items():
            setattr(model.get_submodule(place), name, value)
        model.eval()
        return model


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    place, _, leaf = name.rpartition(".")
    return model.get_submodule(place), leaf


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What the config of a model that `rlhf quantize` wrote says of its weights; else None."""
    found = getattr(config, "quantization_config", None)
    ours = isinstance(found, dict) and found.get("quant_method") == QUANTIZED_BY
    return found if ours else None


def require_unquantized(name: str, config: PreTrainedConfig) -> None:
    """Refuse to train a quantized model.

    Raises:
        InputError: its weights are quantized.
    """
    if quantization_of(config) is not None:
        raise InputError(
            f"{name} is quantized, and only its unquantized original can be trained",
            "Train the model that `rlhf quantize` was given, and quantize the result.",
        )


def require_whole(
    name: str,
    config: str,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[Mismatch],
) -> None:
    """Refuse weights that do not match the model.

    `config` is the file that describes the model; `mismatched` has the shapes in file and model.

    Raises:
        InputError: there are any; the message names them.
    """
    shapes = [f"{one} {tuple(there)} for {tuple(here)}" for one, there, here in mismatched]
    problems = [
        f"{what}: {_few(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    if problems:
        raise InputError(
            f"The weights of {name} are not those that its {config} describes "
            f"({'; '.join(problems)})",
            "Copy or download the model again: config and weights must be saved together.",
        )


def _few(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, … {len(names)} in all"
