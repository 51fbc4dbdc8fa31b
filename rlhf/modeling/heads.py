"""The scalar head of a reward model, and what its classifier reads.

A decoder (Llama, Qwen, …) has the linear layer `score`, read at a response's last token, so it
reads text as a policy writes it. Other classifiers (BERT, RoBERTa, DeBERTa, …) read prompt and
response as a text pair, in both directions; their head is the linear layer with one output above
the trunk, whatever its name.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError

CLASSIFIER = "ForSequenceClassification"
HEAD = "score"
_reads_pairs: dict[tuple[type, str], bool] = {}  # by config: a classifier is built to find out


def architecture(config: PreTrainedConfig) -> str:
    """The class that a config names first; "?" without one."""
    return str((config.architectures or ["?"])[0])


def reads_pairs(config: PreTrainedConfig) -> bool:
    """Whether a model is a classifier that reads prompt and response as a text pair.

    Raises:
        InputError: it is a classifier whose head cannot be found.
    """
    if not architecture(config).endswith(CLASSIFIER):
        return False
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _reads_pairs:
        one_label = copy.deepcopy(config)
        one_label.num_labels = 1
        _reads_pairs[key] = head_name(empty_classifier(one_label)) != HEAD
    return _reads_pairs[key]


def empty_classifier(config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 classifier without storage.

    Raises:
        InputError: the config describes none.
    """
    problem = f"The config of {config.name_or_path} describes no classifier"
    with as_input_error(problem, "Copy or download the model again."), torch.device("meta"):
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    return model


def unused_positions(config: PreTrainedConfig) -> int:
    """Rows of a classifier's position embeddings that it never reads."""
    return max(
        (
            part.padding_idx + 1
            for name, part in empty_classifier(config).named_modules()
            if name.endswith("position_embeddings")
            and isinstance(part, nn.Embedding)
            and part.padding_idx is not None
        ),
        default=0,
    )


def head_name(model: PreTrainedModel) -> str:
    """The name of a reward model's linear layer with one output: `score` in a decoder.

    Raises:
        InputError: the layer cannot be told, or the model reads the response in a decoder of its
            own.
    """
    if isinstance(getattr(model, HEAD, None), nn.Linear):
        return HEAD
    names = [
        f"{part}.{name}".removesuffix(".")
        for part in parts_above_trunk(model)
        for name, layer in model.get_submodule(part).named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == 1
    ]
    if len(names) != 1 or model.config.is_encoder_decoder:
        kind = type(model).__name__
        raise InputError(
            f"{kind} has no head that can be told: neither a linear layer `score`, as decoders "
            "have, nor a single linear layer with one output above an encoder",
            "Use a decoder (Llama, Qwen, Mistral, Gemma, …) or an encoder (BERT, RoBERTa, DeBERTa, "
            "…) with one label. Any other model can score as a function: --reward "
            "signal:package.module:function.",
        )
    return names[0]


def reward_head(model: PreTrainedModel) -> nn.Linear:
    """The scalar head of a reward model.

    Raises:
        InputError: as `head_name`.
    """
    head = model.get_submodule(head_name(model))
    assert isinstance(head, nn.Linear)
    return head


def parts_above_trunk(model: PreTrainedModel) -> list[str]:
    """Names of the modules with weights above a classifier's trunk; of a decoder only `score`."""
    return [
        name
        for name, part in model.named_children()
        if name != model.base_model_prefix and any(True for _ in part.parameters())
    ]


def start_head(head: nn.Linear, seed: int) -> None:
    """Initialize a scalar head.

    Its weights are drawn from N(0, 1/(d+1)), as in the code of arXiv 2009.01325.
    """
    generator = torch.Generator().manual_seed(seed)
    std = 1 / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(torch.empty(head.weight.shape).normal_(std=std, generator=generator))


@contextmanager
def capture_input(module: nn.Module) -> Iterator[list[Tensor]]:
    """The first input of every call of a module within the block, in a list that grows."""
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def empty_reward_model(config: PreTrainedConfig, bias: float) -> PreTrainedModel:
    """A float32 reward model without storage, through which any weights can be saved.

    The config's quantization and attention are dropped; `bias` is added in scoring.
    """
    plain = without_quantization(config)
    plain.reward_bias = bias
    return empty_classifier(plain)


def empty_causal_lm(config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 language model without storage, as `empty_reward_model`."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            without_quantization(config), dtype=torch.float32, trust_remote_code=False
        )
    return model


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config that describes unquantized weights."""
    plain = type(config).from_dict(config.to_dict())
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def put_head_on(trunk: PreTrainedModel, pad_token_id: int) -> PreTrainedModel:
    """A reward model on an existing trunk, with a float32 head of zeros.

    The trunk is not copied, and its config changes.
    """
    trunk.config.num_labels = 1
    trunk.config.get_text_config().pad_token_id = pad_token_id
    model = empty_classifier(without_quantization(trunk.config))
    setattr(model, model.base_model_prefix, trunk)
    model.config = trunk.config  # the attention of all layers is chosen in one config
    head = reward_head(model).to_empty(device="cpu")
    with torch.no_grad():
        for value in head.parameters():
            value.zero_()
    return model
