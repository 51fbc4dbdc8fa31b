"""Small trained matrices beside frozen weights: LoRA (arXiv 2106.09685), QLoRA (arXiv 2305.14314).

Adapters sit on every linear layer of the trunk; the head is trained whole. A checkpoint holds only
what is trained, and the saved model has the adapters merged in: a plain classifier again.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.functional import cast_adapter_dtype
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight, get_bnb_param_type
from peft.utils.other import transpose
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from rlhf.errors import ConfigError
from rlhf.models import reward_head

NAME = "default"
HEAD = "score"


def four_bits(precision: torch.dtype) -> BitsAndBytesConfig:
    """How the frozen weights of QLoRA are held: 4-bit NormalFloat, its scales quantised too.

    Args:
        precision: what they are multiplied in.

    Raises:
        ConfigError: bitsandbytes is not installed, or there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "--adapter qlora needs a CUDA device, and there is none here",
            "Use --adapter lora, which runs everywhere.",
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--adapter qlora needs the package bitsandbytes, which is not installed",
            "Install it: pip install bitsandbytes, or use --adapter lora.",
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,
        llm_int8_skip_modules=[HEAD],  # its name says 8 bits, it serves both
    )


def add_adapters(classifier: PreTrainedModel, rank: int, alpha: int, seed: int) -> None:
    """Freeze a classifier but for its head, and put adapters of this rank on its linear layers.

    Args:
        classifier: changed in place.
        rank: inner size of every adapter.
        alpha: an adapter's product counts alpha / rank.
        seed: of the adapters' first halves, so that all processes start alike; the second are 0.
    """
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="SEQ_CLS")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, classifier, NAME)
    cast_adapter_dtype(classifier, NAME)  # float32, also beside bf16 and 4-bit weights
    reward_head(classifier).requires_grad_(True)


def merged_weights(classifier: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A classifier's state without adapters, W + alpha/rank · B·A in their place, in float32.

    Args:
        classifier: says where adapters are; one without any gives its state back.
        state: all weights by name, gathered from all processes.
    """
    merged = {
        name.replace(".base_layer.", "."): value.float()
        for name, value in state.items()
        if ".lora_" not in name and ".base_layer.weight" not in name
    }
    adapted: dict[str, Any] = {
        name: part for name, part in classifier.named_modules() if isinstance(part, LoraLayer)
    }
    for name, part in adapted.items():
        first, second = (state[f"{name}.lora_{x}.{NAME}.weight"].float() for x in "AB")
        product = transpose(second @ first, part.fan_in_fan_out) * part.scaling[NAME]
        merged[f"{name}.weight"] = _frozen_weight(name, part, state).to(product) + product
    return merged


def _frozen_weight(name: str, part: Any, state: Mapping[str, Tensor]) -> Tensor:
    base = part.base_layer
    if get_bnb_param_type(base.weight):
        unpacked: Tensor = dequantize_module_weight(base).detach()
        return unpacked
    return state[f"{name}.base_layer.weight"]
