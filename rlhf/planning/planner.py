"""How much memory a stage needs in each process, from a model's config: no weights are loaded.

Letters: L layers, d hidden size, f inner size of the MLP, q and k widths of all query and all key
heads, V vocabulary, T tokens of a sequence.

Models are held and trained in float32; with bf16, autocast multiplies in bf16 and keeps what the
backward pass needs of the multiplications in bf16. `--precision bf16-weights` holds weights and
gradients in bf16, too, beside float32 masters. Not counted: the CUDA context (0.5 to 1 GiB),
fragmentation, and temporaries of single operations. Mixtures of experts: weights are right,
activations are those of one expert of the config's inner size.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.pytorch_utils import Conv1D

from rlhf.diagnose import as_input_error
from rlhf.modeling.heads import reads_pairs
from rlhf.modeling.logits.blocks import block_size
from rlhf.modeling.models import load_config
from rlhf.parallel.settings import MemoryKind
from rlhf.planning.plan import Item, Pass

FP32 = 4
BF16 = 2
NF4 = 0.516  # 4 bits and 0.127 for scales, arXiv 2305.14314, section 3
GATES = ("gate_proj", "gate_up_proj")
CHANGED_LOGITS = (  # Gemma 2, Cohere, Granite, RecurrentGemma, xLSTM, Falcon-H1, …
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap"),
    *("output_logit_soft_cap", "lm_head_multiplier", "logits_mup_width_multiplier"),
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model that decide its memory.

    `trunk` counts the parameters below the output matrix; `linear` and `trunk_linear` those of the
    matrices that autocast multiplies in bf16; `lora_rows` is the sum of their inputs and outputs.
    `whole_logits`: log-probs are read from logits of the whole vocabulary, not block by block.
    """

    parameters: int
    trunk: int
    linear: int
    trunk_linear: int
    lora_rows: int
    layers: int
    hidden: int
    inner: int
    query_width: int
    key_width: int
    vocabulary: int
    gated: bool
    whole_logits: bool = False

    @property
    def reward_parameters(self) -> int:
        """Parameters of a reward model on this trunk: one scalar head."""
        return self.trunk + self.hidden

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings, and of their gradient, in float32."""
        return FP32 * self.vocabulary * self.hidden


def read_shape(model: str) -> Shape:
    """The sizes of a model folder or hub name, counted on a copy without storage.

    Raises:
        InputError: there is no such model, or it is neither a language model nor a classifier.
    """
    return shape_of(load_config(model), model)


def shape_of(config: PreTrainedConfig, model: str) -> Shape:
    """The sizes of a model by its config; `model` is its name in an error.

    Raises:
        InputError: it is neither a language model nor a classifier.
    """
    decoder = "Give a decoder model: Llama, Qwen, Mistral, Gemma, GPT-NeoX and similar."
    problem = f"{model} is not a language model ({type(config).__name__})"
    with as_input_error(problem, decoder), torch.device("meta"):
        is_encoder = reads_pairs(config)
        kind = AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM
        network: Any = kind.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    # an encoder's classifier has other layers between trunk and head
    trunk = network if is_encoder else network.base_model
    return Shape(
        parameters=_count(network),
        trunk=_count(trunk) - is_encoder * text.hidden_size,
        linear=sum(weight.numel() for weight in _matrices(network)),
        trunk_linear=sum(weight.numel() for weight in _matrices(trunk)),
        lora_rows=sum(sum(weight.shape) for weight in _matrices(network.base_model)),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=_inner_size(text),
        query_width=heads * width,
        key_width=(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocabulary=text.vocab_size,
        gated=any(name.endswith(GATES) for name, _ in network.named_modules()),
        whole_logits=any(getattr(text, name, None) not in (None, 1) for name in CHANGED_LOGITS),
    )


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _matrices(network: nn.Module) -> list[torch.Tensor]:
    """Weights that autocast multiplies in bf16."""
    return [part.weight for part in network.modules() if isinstance(part, nn.Linear | Conv1D)]


def _inner_size(config: Any) -> int:
    for name in ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 4 * int(config.hidden_size)


def tensor_parallel_shape(shape: Shape, processes: int) -> Shape:
    """What each of `processes` holds and computes of a model under `--parallel.tensor-parallel`.

    Embeddings and matrices are divided, and with them heads and the inside of the MLP. Norms are
    whole, as are the activations between layers.
    """
    embeddings = shape.vocabulary * shape.hidden
    whole = shape.trunk - shape.trunk_linear - embeddings
    output = shape.parameters - shape.trunk  # 0 where it is the embeddings
    return replace(
        shape,
        parameters=whole + (shape.trunk_linear + embeddings + output) // processes,
        trunk=whole + (shape.trunk_linear + embeddings) // processes,
        linear=shape.linear // processes,
        trunk_linear=shape.trunk_linear // processes,
        inner=shape.inner // processes,
        query_width=shape.query_width // processes,
        key_width=shape.key_width // processes,
        whole_logits=shape.whole_logits or processes > 1,
    )


def layer_bytes(
    shape: Shape,
    length: int,
    *,
    bf16: bool,
    padded: bool,
    bf16_weights: bool = False,
    lora_rank: int = 0,
) -> float:
    """Bytes that one layer's forward pass keeps for the backward pass, for each token.

    Counted from the operations of a pre-norm decoder in transformers (what each one saves), in the
    manner of Korthikanti et al. (arXiv 2205.05198, equation 1: 34·d + 5·heads·T, there for 16-bit
    residuals, dropout and attention scores that are kept). With bf16, in brackets with float32:

        two RMS norms         16·d          input and normalized value of each, float32
        copies to project     10·d (8·d)    bf16: one each for q, k, v, gate, up (8·d without gate);
                                            float32: one for attention, one for the MLP
        attention             2·(2q + 2k)   query, key, value, output; (4·…); k = q when padded,
                                            because a mask makes transformers repeat the keys
        padding mask          2·T (4·T)     only when padded
        gated MLP             8·f (16·f)    gate, its activation, up, the product; half without gate

    With bf16 weights a norm keeps its input in float32 and the normalized value in bf16, and what
    it returns is bf16 already: 16·d for norms and copies together. Of frozen weights with
    adapters of rank r, norms keep only their inputs, 8·d; adapters have copies of their own, also
    of attention's output, 2·q, and keep r numbers each.
    """
    size = BF16 if bf16 else FP32
    norms, copies = 16, BF16 * (5 if shape.gated else 4) if bf16 else 2 * FP32
    adapters = 0
    if lora_rank:
        norms = 8
        adapters = size * lora_rank * (7 if shape.gated else 6) + BF16 * bf16 * shape.query_width
    elif bf16_weights:
        copies = 0
    keys = shape.query_width if padded else shape.key_width
    attention = size * (2 * shape.query_width + 2 * keys)
    mask = size * length if padded else 0
    mlp = (4 if shape.gated else 2) * size * shape.inner
    return float((norms + copies) * shape.hidden + attention + mask + mlp + adapters)


def activation_bytes(shape: Shape, one_pass: Pass, *, bf16: bool, padded: bool) -> float:
    """Activations of a forward pass, and of the layer at work on the way back."""
    kept = kept_bytes(shape, one_pass, bf16=bf16, padded=padded)
    return kept + at_work_bytes(shape, one_pass, bf16=bf16, padded=padded)


def kept_bytes(shape: Shape, one_pass: Pass, *, bf16: bool, padded: bool) -> float:
    """Bytes that a pass over `tokens` tokens in sequences of `length` keeps: tokens · L · layer.

    With checkpointing tokens · 4·d·L: of each layer only the float32 input; with bf16 weights
    tokens · 2·d·L.
    """
    if one_pass.checkpointing:
        size = BF16 if one_pass.bf16_weights else FP32
        return float(one_pass.tokens * size * shape.hidden * shape.layers)
    return shape.layers * at_work_bytes(shape, one_pass, bf16=bf16, padded=padded)


def at_work_bytes(shape: Shape, one_pass: Pass, *, bf16: bool, padded: bool) -> float:
    """One layer's gradients on the way back; with checkpointing it is computed again, too."""
    layer = layer_bytes(
        shape,
        one_pass.length,
        bf16=bf16,
        padded=padded,
        bf16_weights=one_pass.bf16_weights,
        lora_rank=one_pass.lora_rank,
    )
    return one_pass.tokens * layer * (2 if one_pass.checkpointing else 1)


def working_bytes(shape: Shape, tokens: int, length: int, *, bf16: bool) -> float:
    """Bytes that one layer holds at a time when nothing is kept: about half of `layer_bytes`."""
    return tokens * layer_bytes(shape, length, bf16=bf16, padded=True) / 2


def logits_bytes(shape: Shape, tokens: int) -> float:
    """Logits of `tokens` positions at their peak: 16·V for each.

    The float32 logits divided by the temperature stay (4·V); in the backward pass the gradients of
    log-sum-exp and of the chosen tokens and their sum come on top (4·V each).
    """
    return float(4 * FP32 * shape.vocabulary * tokens)


def block_bytes(shape: Shape, positions: int, *, backward: bool = False) -> float:
    """Logits of which only log-probs are wanted: one block of the vocabulary, and its exponentials.

    The backward pass needs no more: there the block becomes its gradient. With `whole_logits`,
    float32 logits of the whole vocabulary come on top (4·V), and in the backward pass their
    gradients (4·V).
    """
    block = 2 * min(block_size(positions), shape.vocabulary)
    whole = (2 if backward else 1) * shape.vocabulary if shape.whole_logits else 0
    return float(FP32 * (block + whole) * positions)


def part_of_vocabulary(shape: Shape) -> str:
    """Which logits exist at one time, in words."""
    return "the whole vocabulary" if shape.whole_logits else "a block of the vocabulary"


def kv_cache_bytes(shape: Shape, tokens: int, *, bf16: bool) -> float:
    """Keys and values of `tokens` positions: L·k·(4 + 4), with bf16 L·k·(2 + 2)."""
    return float(shape.layers * shape.key_width * tokens * 2 * (BF16 if bf16 else FP32))


def trained_items(
    name: str, parameters: int, *, buckets: bool = False, rounded: int | None = None
) -> list[Item]:
    """Weights and moments; with `buckets` every gradient is held a second time.

    With bf16 weights `rounded` of them have float32 masters; the others are their own masters.
    """
    items = [
        Item(
            f"{name}: weights",
            FP32 * parameters,
            "float32, 4 bytes per parameter",
            MemoryKind.WEIGHTS,
        ),
        Item(
            f"{name}: Adam",
            2 * FP32 * parameters,
            "two moments, 8 bytes per parameter",
            MemoryKind.OPTIMIZER,
        ),
    ]
    if rounded is not None:
        why = "float32, 4 bytes per parameter; heads among them"
        items[0] = Item(
            f"{name}: weights", BF16 * rounded, "bf16, 2 bytes each", MemoryKind.WEIGHTS
        )
        items.append(Item(f"{name}: masters", FP32 * parameters, why, MemoryKind.OPTIMIZER))
    if buckets:
        why = "gradients on their way to other processes"
        items.append(Item(f"{name}: buckets", FP32 * parameters, why, MemoryKind.GRADIENTS))
    return items


def stepped_item(name: str, parameters: float) -> Item:
    """The weights that DeepSpeed's optimizer steps, beside those that are computed with."""
    why = "DeepSpeed's own copy of the weights"
    return Item(f"{name}: stepped weights", FP32 * parameters, why, MemoryKind.OPTIMIZER)


def gradient_item(parameters: int, rounded: int | None = None) -> Item:
    """Gradients, `rounded` of them in bf16."""
    size = FP32 * parameters - (FP32 - BF16) * (rounded or 0)
    return Item("gradients", size, "bf16" if rounded else "float32", MemoryKind.GRADIENTS)


def frozen_item(name: str, parameters: float, part: str = "weights") -> Item:
    """Weights of a model that are not trained."""
    return Item(f"{name}: {part}", FP32 * parameters, "float32, frozen", MemoryKind.WEIGHTS)


def frozen_precision(*, bf16: bool) -> tuple[int, str]:
    """Bytes of a frozen weight, and the name of its precision."""
    return (BF16, "bf16") if bf16 else (FP32, "float32")


def packed_bytes(shape: Shape, parameters: int, size: int) -> float:
    """Bytes of a model with its trunk's matrices in 4 bits and other weights of `size` bytes."""
    return NF4 * shape.trunk_linear + size * (parameters - shape.trunk_linear)


def copies(parameters: float, *, bf16: bool) -> list[Item]:
    """The copies that autocast keeps of trained weights; frozen ones are cast each time."""
    if not bf16 or not parameters:
        return []
    size = BF16 * parameters
    return [Item("bf16 copies of the matrices", size, "kept by autocast", MemoryKind.COPIES)]


def stepping_items(
    parameters: int, rounded: int | None = None, shape: Shape | None = None
) -> tuple[Item, ...]:
    """Memory of an optimizer step besides weights and moments; fused AdamW needs gradients only.

    Masters of bf16 weights are stepped one by one, which needs the float32 gradient of one; the
    largest is among those of `shape`.
    """
    gradients = gradient_item(parameters, rounded)
    if not rounded or shape is None:
        return (gradients,)
    largest_gradient = FP32 * float(largest_matrix(shape))
    return gradients, Item(
        "gradient of one master", largest_gradient, "float32, the largest matrix"
    )


def largest_matrix(shape: Shape) -> int:
    """Elements of the largest matrix of a language model."""
    return shape.hidden * max(shape.vocabulary, shape.inner)
