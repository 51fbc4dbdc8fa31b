"""Weight-only quantization in the format `compressed-tensors`, which transformers and vLLM read.

Every linear layer of the trunk becomes integers q with scales s, W ≈ s·q: one scale for each row
(int8), or for each group of neighboring inputs of a row (int4). Rounding is to the nearest; scales
of int4 are those with the smallest squared error. No data are needed. Embeddings, norms and the
output matrix become bf16; a reward model's head stays float32.

Letters: O outputs, G groups of a row, I inputs of a group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    initialize_module_for_quantization,
)
from compressed_tensors.quantization.utils import calculate_qparams
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.deployment.settings import FormName
from rlhf.errors import InputError
from rlhf.modeling.heads import parts_above_trunk
from rlhf.planning.flops import experts_of

FORMAT = "pack-quantized"
STORED = torch.bfloat16  # what is not quantized, and the scales


@dataclass(frozen=True, kw_only=True)
class Form:
    """How weights are stored.

    Args:
        bits: of each weight.
        group_sizes: inputs that share a scale, the first that divides every layer's; none: a row.
        clips: shares of a group's largest weight to try as the largest integer's value.
    """

    bits: int
    group_sizes: tuple[int, ...] = ()
    clips: tuple[float, ...] = (1.0,)


FORMS: dict[FormName, Form] = {
    "int8": Form(bits=8),
    "int4": Form(
        bits=4,
        group_sizes=(128, 64, 32),  # those of vLLM's kernels
        clips=(1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6),
    ),
}


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers of the trunk, by name."""
    return {name: part for name, part in _linears(model) if not _is_above_trunk(model, name)}


@torch.no_grad()
def quantize_weights(
    model: PreTrainedModel, name: FormName, on_layer: Callable[[], None] = lambda: None
) -> None:
    """Quantize a float32 model in place; it can then be saved, no longer used.

    Args:
        model: a language model or a reward model.
        name: of the form.
        on_layer: called after each layer.

    Raises:
        InputError: it has no linear layers, no group size divides their inputs, or it has experts,
            whose weights would stay as they are.
    """
    _require_no_experts(model)
    form, layers = FORMS[name], linear_layers(model)
    args = _arguments(model, form, layers)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=FORMAT)
    for layer in layers.values():
        initialize_module_for_quantization(layer, scheme)
        grouped = layer.weight.unflatten(1, (-1, args.group_size or layer.in_features))
        layer.weight_scale.data = choose_scales(grouped, args, form.clips)
        compress_module(layer)
        on_layer()
    _round_the_rest(model)
    described = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=[layer for layer, _ in _linears(model) if _is_above_trunk(model, layer)],
        format=FORMAT,
        quantization_status="compressed",
    )
    model.config.quantization_config = described.model_dump(mode="json")
    model.config.dtype = STORED


def _require_no_experts(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    if any(experts_of(part, config) for part in model.modules()):
        raise InputError(
            f"{type(model).__name__} is a mixture of experts, whose weights this does not quantize",
            "Serve it in bf16, or quantize it when it is loaded: vllm serve --quantization fp8.",
        )


def choose_scales(
    weight: Float[Tensor, "O G I"], args: QuantizationArgs, clips: tuple[float, ...]
) -> Float[Tensor, "O G"]:
    """The scales s, rounded to bf16, with the smallest Σ (W − s·round(W/s))² in each group.

    Candidates take c · max |W| as the largest value, for each clip c; what is larger is cut.
    """
    low, high = weight.amin(dim=2), weight.amax(dim=2)
    largest = 2 ** (args.num_bits - 1)
    candidates = [
        calculate_qparams(clip * low, clip * high, args)[0].to(STORED).float() for clip in clips
    ]
    errors = []
    for scale in candidates:
        rounded = (weight / scale[:, :, None]).round().clamp(-largest, largest - 1)
        errors.append((weight - rounded * scale[:, :, None]).square().sum(dim=2))
    best = torch.stack(errors).argmin(dim=0, keepdim=True)
    return torch.stack(candidates).gather(0, best).squeeze(0)


def _arguments(
    model: PreTrainedModel, form: Form, layers: dict[str, nn.Linear]
) -> QuantizationArgs:
    """The library's description of a form for this model."""
    kind = type(model).__name__
    if not layers:
        raise InputError(
            f"{kind} has no linear layers to quantize", "Quantize a model of another architecture."
        )
    if not form.group_sizes:
        return QuantizationArgs(num_bits=form.bits, strategy=QuantizationStrategy.CHANNEL)
    inputs = {layer.in_features for layer in layers.values()}
    fitting = (size for size in form.group_sizes if not any(width % size for width in inputs))
    size = next(fitting, None)
    if size is None:
        raise InputError(
            f"{kind} has linear layers of {sorted(inputs)} inputs, which groups of "
            f"{min(form.group_sizes)} do not divide",
            "Use --to int8.",
        )
    return QuantizationArgs(
        num_bits=form.bits, strategy=QuantizationStrategy.GROUP, group_size=size
    )


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    layers = ((name, part) for name, part in model.named_modules() if type(part) is nn.Linear)
    yield from layers  # exactly: layers of other kinds compute something else with their weights


def _is_above_trunk(model: PreTrainedModel, name: str) -> bool:
    """Whether a module or weight belongs to the output matrix or to a reward model's head."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts_above_trunk(model))


def _round_the_rest(model: PreTrainedModel) -> None:
    """Store every other number in bf16, except those of a reward model's head."""
    is_policy = model.get_output_embeddings() is not None
    for name, value in model.named_parameters():
        if value.is_floating_point() and (is_policy or not _is_above_trunk(model, name)):
            value.data = value.data.to(STORED)
