"""The arithmetic that models do, counted by formula from the shape of every forward pass.

A product of N rows with a matrix of d × f numbers takes 2·N·d·f operations. Its backward pass takes
as many for the gradient of the rows, and as many again for that of the matrix if it is trained.
Attention takes 4·q operations for every query and key that it multiplies, where q is the width of
all query heads, and twice as many backward. What is computed counts: padding, both sides of the
causal mask, and layers that are computed again under gradient checkpointing. Norms, activations,
embeddings and heads with one output are not counted. Of a mixture of experts, the experts that a
token is sent to count, not the router. Of sequences that continuous batching puts
into one row, each counts with its own keys; what a mask hides of the others' does not.

Letters: T tokens of a pass, N positions whose logits are read, d hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import fmean
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.modeling.attention.checkpointing import checkpoints_activations
from rlhf.modeling.attention.layout import Segments

READS_HIDDEN = {  # the projections at the beginning of a layer, by the families' names
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"),
    *("query", "key", "value", "Wqkv"),
}
FIRST_LAYER = "0"
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # by families' names


@dataclass
class FlopCount:
    """Counts of the models' work: operations, tokens read, and forward passes."""

    flops: float = 0.0
    tokens: int = 0
    passes: int = 0


@dataclass(frozen=True)
class Matrices:
    """Sizes of a trunk's matrices, in numbers.

    Attributes:
        all: of all that are multiplied.
        reached: of those whose input has a gradient.
        trained: of those that have a gradient themselves.
        recomputed: of those that gradient checkpointing multiplies again: all but the last of each
            layer, whose product no gradient needs.
        query_width: of all query heads of a layer, summed over layers.
    """

    all: int
    reached: int
    trained: int
    recomputed: int
    query_width: int


_done = FlopCount()
_counted: WeakSet[nn.Module] = WeakSet()
_adapted: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_matrices: WeakKeyDictionary[nn.Module, dict[Any, Matrices]] = WeakKeyDictionary()


def count_flops(model: Any, *, keeps_logits: bool = False) -> None:
    """Count what a language model or classifier of transformers does from now on.

    Models that share a trunk are counted once. Call it after adapters were added.

    Args:
        model: to count.
        keeps_logits: the logits of the forward pass are kept for the backward pass, as autograd
            does; our own log-probs compute them again (`rlhf.modeling.logits`).
    """
    trunk = model.base_model
    _find_adapter(trunk)
    if trunk not in _counted:
        _counted.add(trunk)
        trunk.register_forward_pre_hook(_count_trunk, with_kwargs=True)
    output = model.get_output_embeddings()
    if output is not None and output not in _counted:
        _counted.add(output)
        output.register_forward_pre_hook(partial(_count_output, again=not keeps_logits))


def _find_adapter(trunk: nn.Module) -> None:
    """Remember a layer with adapters: looking for it in every pass would take milliseconds."""
    _adapted[trunk] = next((part for part in trunk.modules() if isinstance(part, LoraLayer)), None)


def take_flops() -> FlopCount:
    """The counts since the last call, which start anew."""
    count = FlopCount(_done.flops, _done.tokens, _done.passes)
    _done.flops, _done.tokens, _done.passes = 0.0, 0, 0
    return count


def _count_trunk(trunk: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = named.get("input_ids")
    if given is None:
        given = named.get("inputs_embeds")
    if given is None:
        given = arguments[0]
    rows, length = given.shape[:2]
    sizes = _sizes(trunk)
    pairs = attended_pairs(rows, length, named)
    _done.tokens += rows * length
    _done.passes += 1
    _done.flops += trunk_flops(sizes, rows * length, pairs)
    if torch.is_grad_enabled() and sizes.trained:
        again = checkpoints_activations(trunk) and trunk.training
        _done.flops += backward_flops(sizes, rows * length, pairs)
        if again:
            _done.flops += 2.0 * rows * length * sizes.recomputed + 4.0 * sizes.query_width * pairs


def trunk_flops(sizes: Matrices, tokens: float, pairs: float) -> float:
    """Operations of a trunk's forward pass: 2·T·matrices + 4·q·pairs."""
    return 2.0 * tokens * sizes.all + 4.0 * sizes.query_width * pairs


def backward_flops(sizes: Matrices, tokens: float, pairs: float) -> float:
    """Operations of its backward pass: 2·T·(reached + trained) + 8·q·pairs."""
    return 2.0 * tokens * (sizes.reached + sizes.trained) + 8.0 * sizes.query_width * pairs


def attended_pairs(rows: int, length: int, named: dict[str, Any]) -> int:
    """Queries times the keys they are multiplied with.

    In a packed row of a prompt of P tokens and responses of R: P² + Σ R·(P + R). In a row of
    continuous batching: Σ of each sequence's new tokens times its tokens until now.
    """
    query_ends = named.get("cu_seq_lens_q")
    if query_ends is not None:
        return _batched_pairs(query_ends, named["cu_seq_lens_k"], rows * length)
    layout: Segments | None = named.get("layout")
    if layout is not None:
        return sum(
            segment.prompt**2 + sum(own * (segment.prompt + own) for own in segment.responses)
            for segment in layout
        )
    cache: Any = named.get("past_key_values")
    before = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
    return rows * length * (before + length)


def _batched_pairs(query_ends: Tensor, key_ends: Tensor | dict[str, Tensor], tokens: int) -> int:
    """Σ queries · keys over the sequences of a row, from where they end in it.

    Layers with a sliding window count as others do. On a GPU the ends are not read, since graphs
    are captured there: every token counts with itself.
    """
    if query_ends.device.type != "cpu":
        return tokens
    kinds = list(key_ends.values()) if isinstance(key_ends, dict) else [key_ends]
    return max(int((query_ends.diff() * ends.diff()).sum()) for ends in kinds)


def _count_output(output: nn.Module, arguments: tuple[Any, ...], *, again: bool) -> None:
    """2·N·d·V forward; backward computes the logits `again` or not, then both gradients."""
    hidden: Tensor = arguments[0]
    weight: Any = output.weight
    product = 2.0 * hidden.numel() * getattr(output, "out_features", len(weight))
    times = 1
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        times += again + hidden.requires_grad + weight.requires_grad
    _done.flops += times * product


def count_fused_head(model: Any) -> None:
    """Count the products of trl's fused head, which never calls the output layer.

    Args:
        model: what the trainer calls, around a model that `count_flops` counts: with adapters, the
            one of peft.
    """
    model.register_forward_hook(_count_fused_head, with_kwargs=True)


def _count_fused_head(
    model: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any
) -> None:
    """2·N·d·V forward; backward computes the logits again, then both gradients.

    N counts the positions with a label.
    """
    if not named.get("fused_lm_head"):
        return
    output, positions = model.get_output_embeddings(), int(result.label_mask.sum())
    times = 1
    if result.log_probs.requires_grad:
        times += 2 + output.weight.requires_grad
    _done.flops += times * 2.0 * positions * _size(output)


def _sizes(trunk: nn.Module) -> Matrices:
    """The sizes of a trunk, which depend on the adapters in use and on what is trained."""
    known = _matrices.setdefault(trunk, {})
    if trunk not in _adapted:  # a copy of a counted model has its hooks
        _find_adapter(trunk)
    layer = _adapted[trunk]
    adapters = () if layer is None or layer.disable_adapters else tuple(layer.active_adapters)
    if adapters not in known:
        known[adapters] = measure_matrices(trunk, adapters)
    return known[adapters]


def measure_matrices(trunk: nn.Module, adapters: tuple[str, ...] = ()) -> Matrices:
    """The sizes of a trunk with these adapters.

    Without trained embeddings, gradients end at the projections of the first layer.
    """
    config: Any = trunk.config
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    embedded = any(weight.requires_grad for weight in trunk.get_input_embeddings().parameters())  # type: ignore[operator]
    total = reached = trained = 0
    last: dict[str, int] = {}
    for name, part in trunk.named_modules():
        name_parts = name.split(".")
        weights = [] if _is_idle(name_parts, adapters) else _multiplied(part, text)
        size = sum(numbers for _, numbers in weights)
        if not size:
            continue
        total += size
        # what experts give is weighted, and the gradient of the weights needs it again
        is_needed = len(_shape(weights[-1][0])) == 3
        last[next((number for number in name_parts if number.isdigit()), "")] = (
            0 if is_needed else size
        )
        trained += sum(numbers for weight, numbers in weights if weight.requires_grad)
        is_first = FIRST_LAYER in name_parts and bool(READS_HIDDEN & set(name_parts))
        if embedded or not is_first or "lora_B" in name_parts:
            reached += size
    query_width = heads * width * text.num_hidden_layers
    return Matrices(total, reached, trained, total - sum(last.values()), query_width)


def _is_idle(name_parts: list[str], adapters: tuple[str, ...]) -> bool:
    """Whether a module belongs to an adapter that is not in use."""
    is_adapter = "lora_A" in name_parts or "lora_B" in name_parts
    return is_adapter and name_parts[-1] not in adapters


def _multiplied(part: nn.Module, config: Any) -> list[tuple[Tensor, int]]:
    """A module's own matrices, and how many of their numbers a token is multiplied with."""
    if isinstance(part, nn.Linear | Conv1D):
        return [(part.weight, _size(part))]
    taken = _experts_per_token(config)
    return [(weight, taken * prod(_shape(weight)[1:])) for weight in experts_of(part, config)]


def experts_of(part: nn.Module, config: Any) -> list[nn.Parameter]:
    """The weights of a module's experts, as transformers keeps them: a matrix each, stacked.

    Args:
        part: of a model.
        config: of its text; without experts for a token there are none.
    """
    if isinstance(part, nn.Conv1d) or not _experts_per_token(config):
        return []
    return [weight for weight in part.parameters(recurse=False) if len(_shape(weight)) == 3]


def _experts_per_token(config: Any) -> int:
    experts = next(
        (value for name in EXPERTS_PER_TOKEN if (value := getattr(config, name, None))), 0
    )
    return round(fmean(experts)) if isinstance(experts, list) else experts  # one for each layer


def _shape(weight: Tensor) -> torch.Size:
    """The shape of a weight, also where DeepSpeed keeps only a part of it here."""
    return getattr(weight, "ds_shape", weight.shape)


def _size(part: nn.Module) -> int:
    """Numbers in a matrix, also where it is sharded or packed into four bits."""
    if isinstance(part, nn.Linear):
        return part.in_features * part.out_features
    return int(part.weight.numel())  # type: ignore[operator]
