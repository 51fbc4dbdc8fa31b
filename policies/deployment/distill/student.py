"""A student of half the layers: every second layer of a model, and all of the rest."""

import re
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf.errors import InputError
from rlhf.modeling.attention.matmul import use_products

LAYER = re.compile(r"(?:.*\.)(?:layers|h|blocks)\.(\d+)\.")  # names of a layer's weights


def half_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the layers 0, 2, 4, … of `model`, with copies of their weights.

    Raises:
        InputError: the layers cannot be told, or there is one.
    """
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    state = model.state_dict()
    found = {int(match[1]) for name in state if (match := LAYER.match(name))}
    if layers < 2 or found != set(range(layers)):
        raise InputError(
            f"The layers of {type(model).__name__} cannot be halved ({layers} of them, "
            f"{len(found)} with weights of their own)",
            "Leave --half out, and give a smaller --student.",
        )
    config = half_config(model.config)
    is_policy = model.get_output_embeddings() is not None
    kind: Any = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    student: PreTrainedModel = kind.from_config(config, dtype=model.dtype, trust_remote_code=False)
    kept = {new: value for name, value in state.items() if (new := _name_in_half(name)) is not None}
    student.load_state_dict(kept)
    if is_policy:
        student.generation_config = model.generation_config
    use_products(student)
    return student


def half_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model with every second layer of this one."""
    half = type(config).from_dict(config.to_dict())
    text: Any = half.get_text_config()
    layers = text.num_hidden_layers
    text.num_hidden_layers = (layers + 1) // 2
    for name, value in list(vars(text).items()):  # one entry a layer: layer_types, no_rope_layers
        is_list = "layer" in name and isinstance(value, list) and len(value) == layers
        if is_list and value != list(range(layers)):  # which names all layers
            setattr(text, name, value[::2])
    return half


def _name_in_half(name: str) -> str | None:
    """The name of a weight after halving; None of a layer that is left out."""
    match = LAYER.match(name)
    if match is None:
        return name
    layer = int(match[1])
    return None if layer % 2 else f"{name[: match.start(1)]}{layer // 2}{name[match.end(1) :]}"
