"""A student of half the layers of a model, those that change hidden states most."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf.errors import InputError
from rlhf.modeling.attention.matmul import use_products
from rlhf.ranks import is_main_process

LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)(?:\.|$)")  # a layer, or weights of one
READ = 32  # texts by which layers are chosen


def half_of(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> PreTrainedModel:
    """A model of half the layers of `model`, with copies of their weights, in their order.

    Args:
        model: whose layers and other weights are copied.
        texts: token ids that the model will be trained on; at most 32 of them, spread evenly, are
            read to choose the layers.

    Raises:
        InputError: the layers cannot be told, or there is one.
    """
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    state = model.state_dict()
    layers_with_weights = {int(match[1]) for name in state if (match := LAYER.match(name))}
    if layers < 2 or layers_with_weights != set(range(layers)):
        raise InputError(
            f"The layers of {type(model).__name__} cannot be halved ({layers} of them, "
            f"{len(layers_with_weights)} with weights of their own)",
            "Leave --half out, and give a smaller --student.",
        )
    count = min(READ, len(texts))
    read = [texts[number * len(texts) // count] for number in range(count)]
    if is_main_process():
        sys.stderr.write(f"Reading {count} of the outputs to choose {(layers + 1) // 2} layers.\n")
    kept_layers = strongest_half(block_influence(model, read))
    config = half_config(model.config, kept_layers)
    is_policy = model.get_output_embeddings() is not None
    kind: Any = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    student: PreTrainedModel = kind.from_config(config, dtype=model.dtype, trust_remote_code=False)
    student.load_state_dict(
        {
            new: value
            for name, value in state.items()
            if (new := _name_in_half(name, kept_layers)) is not None
        }
    )
    if is_policy:
        student.generation_config = model.generation_config
    use_products(student)
    return student


@torch.no_grad()
def block_influence(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> list[float]:
    """How much each layer changes hidden states: 1 - their cosine similarity before and after it.

    The block influence of ShortGPT (arXiv 2403.03853, equation 1), a mean over all tokens.
    """
    layers = {
        int(match[1]): module
        for name, module in model.named_modules()
        if (match := LAYER.fullmatch(name))
    }
    sums = [0.0] * len(layers)

    def adder(number: int) -> Any:
        def add(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            after: Tensor = output[0] if isinstance(output, tuple) else output
            alike = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            sums[number] += float((1 - alike).sum())

        return add

    handles = [
        layer.register_forward_hook(adder(number), with_kwargs=True)
        for number, layer in layers.items()
    ]
    was_training = model.training
    model.eval()
    try:
        for ids in texts:
            model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return [total / sum(map(len, texts)) for total in sums]


def strongest_half(influence: Sequence[float]) -> list[int]:
    """The numbers of the half of the layers, rounded up, with the greatest influence, ascending."""
    by_influence = sorted(range(len(influence)), key=lambda number: -influence[number])
    return sorted(by_influence[: (len(influence) + 1) // 2])


def half_config(
    config: PreTrainedConfig, kept_layers: Sequence[int] | None = None
) -> PreTrainedConfig:
    """The config of a model with `kept_layers` of this one; by default with every second."""
    half = type(config).from_dict(config.to_dict())
    text: Any = half.get_text_config()
    layers = text.num_hidden_layers
    chosen = range(0, layers, 2) if kept_layers is None else kept_layers
    text.num_hidden_layers = len(chosen)
    for name, value in list(vars(text).items()):  # one entry a layer: layer_types, no_rope_layers
        is_list = "layer" in name and isinstance(value, list) and len(value) == layers
        if is_list and value != list(range(layers)):  # which names all layers
            setattr(text, name, [value[number] for number in chosen])
    return half


def _name_in_half(name: str, kept_layers: Sequence[int]) -> str | None:
    """The name of a weight after halving; None of a layer that is left out."""
    match = LAYER.match(name)
    if match is None:
        return name
    layer = int(match[1])
    if layer not in kept_layers:
        return None
    return f"{name[: match.start(1)]}{kept_layers.index(layer)}{name[match.end(1) :]}"
