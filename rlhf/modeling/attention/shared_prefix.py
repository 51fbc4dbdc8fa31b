"""Encode a prompt once for all its responses, and many prompts in one row without padding.

A row is prompt, response, …, response, prompt, response, …; a response attends to its own prompt
and itself only, and its positions continue the prompt's. K responses of R tokens to a prompt of P
tokens cost P + K·R tokens instead of K·(P + R), and give the same rewards and gradients. Only
attention differs: every other layer works on single tokens.

It is registered with transformers as the attention `shared_prefix`, for every architecture that
uses transformers' attention interface. `prefix_matmul` computes it, on GPUs `flex` if it can.
Letters: T tokens, H heads, G key-value heads (G ≤ H), D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf.modeling.attention.flex import flex_prefix_attention, is_usable
from rlhf.modeling.attention.layout import Segments, TrunkInputs, last_tokens, pack_prompts, states
from rlhf.modeling.attention.matmul import product_attention
from rlhf.modeling.attention.prefix_matmul import prefix_attention
from rlhf.modeling.heads import reads_pairs
from rlhf.modeling.tokens import pad_right
from rlhf.modeling.weights.first_layers import first_layers
from rlhf.parallel.distributed import on_main
from rlhf.parallel.layers import ON_MAIN
from rlhf.ranks import is_main_process

Probe = Callable[[PreTrainedModel], float]

ATTENTION = "shared_prefix"
# in trials on random tokens, rounding alone reached 0.1 % of a trained model's largest output,
# wrong positions 9 %, a wrong mask 40 %
TOLERANCES = {torch.float32: 0.01}
ROUNDED = 0.03  # where weights are rounded to fewer bits
# of the first two layers of SmolLM2-135M, in float32: rounding 0.00001 %, wrong positions or a
# wrong mask 1 % to 44 %
TOLERANCE_OF_FIRST_LAYERS = 0.001
LEAST_SAVING = 0.1  # of the tokens of padded rows: with less, padded rows are as fast


def shared_prefix_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 G T D"],
    value: Float[Tensor, "1 G T D"],
    attention_mask: Tensor | None,
    layout: Segments | None = None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attention over a packed row, as transformers calls it; plain causal without a layout."""
    if layout is None:
        return product_attention(module, query, key, value, attention_mask, scaling, **rest)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_usable(query, key, value):
        return flex_prefix_attention(query, key, value, layout, scale), None
    # Under autocast only projections give the lower precision; rotation brings back float32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return prefix_attention(q, k, v, layout, scale).unsqueeze(0), None


def share_prompts(model: PreTrainedModel) -> str | None:
    """Switch a model to this attention; if it would not be exact, return why and change nothing."""
    if reads_pairs(model.config):
        return f"{type(model).__name__} reads in both directions"
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, shared_prefix_attention)
    return try_attention(model, ATTENTION, _probe)


def try_attention(model: PreTrainedModel, attention: str, probe: Probe) -> str | None:
    """Switch a model to an attention for packed rows; else return the reason why not.

    A trial decides: `probe` runs a small packed row and the same sequences padded, and returns the
    difference between the trunk's outputs, relative to the largest. Where not every process has the
    weights, the main one's trial decides for all, which all call this: on the whole model if it has
    all weights, else on the first layers.
    """
    if not any(hasattr(part, ON_MAIN) for part in model.modules()):
        return _try(model, attention, probe)
    reason = on_main(lambda: _try(model, attention, probe))
    if reason is None and not is_main_process():
        model.set_attn_implementation(attention)
    return reason


def _try(model: PreTrainedModel, attention: str, probe: Probe) -> str | None:
    if reason := other_attention(model.config):
        return reason
    before, name = model.config._attn_implementation, type(model).__name__
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        return f"{name} has its own attention code"
    usual = TOLERANCES.get(model.dtype, ROUNDED)
    try:
        tried = first_layers(model)
        difference = probe(tried)
        if difference <= (usual if tried is model else TOLERANCE_OF_FIRST_LAYERS):
            return None
        reason = f"packed rows change what {name} gives by {difference:.2%}"
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"{name} cannot run on packed rows ({error})"
    model.set_attn_implementation(before)
    return reason


def other_attention(config: PreTrainedConfig) -> str | None:
    """Attention that differs from causal only beyond a distance, which a short trial cannot see."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"its layers use {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return f"its attention slides over a window of {window} tokens"
    return None


@torch.no_grad()
def _probe(model: PreTrainedModel) -> float:
    """Largest difference at the ends of responses between a packed row and padded rows."""
    first = (tuple(range(3, 14)), ((14, 15, 16), (17,), (18, 19)))
    second = ((5, 9, 7), ((11, 3), (4, 8, 6, 10)))
    packed = pack_prompts([first, second], 0)
    sequences = [prompt + response for prompt, own in (first, second) for response in own]
    padded = pad_right(sequences, 0)
    reads = last_tokens(padded.mask.sum(dim=1), padded.ids.shape[1])
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    both = [inputs.to(device) for inputs in (packed, TrunkInputs(padded.ids, reads))]
    outputs, expected = (states(model, inputs)[inputs.reads] for inputs in both)
    model.train(was_training)
    return float((outputs - expected).abs().max() / expected.abs().max())
