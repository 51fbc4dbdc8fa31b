"""LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314): small trained matrices on frozen weights.

Every linear layer of the trunk has adapters; a head is trained whole. A checkpoint holds only what
is trained. In a saved model the adapters are merged into the weights; a reward model also keeps
them beside its weights in peft's format, for use on frozen weights that are loaded already:

    MODEL/adapter/   adapter_config.json, adapter_model.safetensors (peft's), base.json
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.functional import cast_adapter_dtype, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight, get_bnb_param_type
from peft.utils.other import transpose
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.diagnose import as_input_error
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.heads import (
    HEAD,
    empty_causal_lm,
    parts_above_trunk,
    put_head_on,
    reward_head,
)
from rlhf.modeling.models import load_config, save_model
from rlhf.modeling.weights.whole import COPY_AGAIN, require_whole
from rlhf.parallel.layers import stand_ins
from rlhf.parallel.weight_files import WeightFiles
from rlhf.records.documents import read_document
from rlhf.records.jsonl import new_folder, write_json

NAME = "default"
UNQUANTIZED = (HEAD, "lm_head", "embed_out")  # head or output matrix of a 4-bit model
FOLDER = "adapter"
BASE = "base.json"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


def four_bits(precision: torch.dtype, flag: str, instead: str) -> BitsAndBytesConfig:
    """The quantization of QLoRA's frozen weights: 4-bit NormalFloat, its scales quantized too.

    `precision` is that of the multiplications; errors name `flag`, which was given, and `instead`,
    which runs everywhere.

    Raises:
        ConfigError: bitsandbytes is not installed, or there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{flag} needs a CUDA device, and there is none here",
            f"Use {instead}, which runs everywhere.",
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{flag} needs the package bitsandbytes, which is not installed",
            f"Install it: pip install bitsandbytes, or use {instead}.",
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,
        llm_int8_skip_modules=list(UNQUANTIZED),  # also applies to 4 bits
    )


def add_adapters(model: PreTrainedModel, rank: int, alpha: int, seed: int) -> None:
    """Freeze a model except a classifier's head, and put adapters on its linear layers, in place.

    An adapter's output is scaled by alpha / rank. The seed is that of the A matrices, so that all
    processes start equal; the B matrices are 0.
    """
    if model.get_output_embeddings() is not None:
        _inject(lora_config(rank, alpha), model, seed)
        return
    config = lora_config(rank, alpha, "SEQ_CLS")
    if (above := parts_above_trunk(model)) != [HEAD]:
        config.exclude_modules = rf"({'|'.join(above)})(\..*)?"
    _inject(config, model, seed)


def lora_config(rank: int, alpha: int, kind: str = "CAUSAL_LM") -> LoraConfig:
    """Adapters on all linear layers of the trunk, scaled by alpha / rank; `kind` is peft's task."""
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type=kind)


def _inject(config: LoraConfig, model: PreTrainedModel, seed: int) -> None:
    # fork only this process's device: forking all would initialize every GPU
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        with stand_ins(model):  # peft puts adapters where the weights are
            inject_adapter_in_model(config, model, NAME)
    cast_adapter_dtype(model, NAME)  # float32, also beside bf16 and 4-bit weights
    if model.get_output_embeddings() is None:
        for part in parts_above_trunk(model):
            model.get_submodule(part).requires_grad_(True)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without its adapters, as before `add_adapters`."""
    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(
    model: nn.Module, state: Mapping[str, Tensor], device: str | None = None
) -> dict[str, Tensor]:
    """A model's gathered state with the adapters merged: W + alpha/rank · B·A, in float32.

    Merged weights go to `device`; by default they stay where they are.
    """
    return {
        name: weight.to(device).float()
        for name, weight in each_merged_weight(model, state, lambda value: value)
    }


def each_merged_weight(
    model: nn.Module, state: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """A model's weights one by one, by the names of the model without adapters, which are merged.

    Args:
        model: with or without adapters.
        state: its `state_dict`, in which weights may be sharded.
        gather: makes a weight of `state` whole. Where it is a collective, all ranks iterate.
    """
    for name, value in state.items():
        layer, is_adapted, statistics = name.partition(".base_layer.weight")
        if ".lora_" in name or statistics:  # of 4-bit weights
            continue
        if not is_adapted:
            yield name.replace(".base_layer.", "."), gather(value)
            continue
        part: Any = model.get_submodule(layer)
        first, second = (gather(state[f"{layer}.lora_{x}.{NAME}.weight"]).float() for x in "AB")
        product = transpose(second @ first, part.fan_in_fan_out) * part.scaling[NAME]
        yield f"{layer}.weight", _frozen_weight(part, value, gather).to(product) + product


def save_merged(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a language model as a plain one, in float32 if adapters are merged in."""
    if not hasattr(model, "peft_config"):
        save_model(model, tokenizer, folder)
        return
    # in main memory: beside a training, a device has no room for a second model
    state = merged_weights(model, model.state_dict(), "cpu")
    for name in model.all_tied_weights_keys:
        del state[name]
    save_model(_plain(model), tokenizer, folder, state)


def save_sharded(
    accelerator: Accelerator,
    model: Any,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Save a sharded language model as a plain one in float32; all processes call it.

    Args:
        accelerator: whose processes hold the weights.
        model: of which `state` are the weights, with or without adapters.
        state: its weights by name, sharded or not.
        tokenizer: to be saved with it.
        folder: to be written.
    """
    untied = {
        name: weight for name, weight in state.items() if name not in model.all_tied_weights_keys
    }
    plain = _plain(model)
    files = WeightFiles(
        accelerator, plain, lambda gather: each_merged_weight(model, untied, gather)
    )
    save_model(plain, tokenizer, folder, files=files)


def _plain(model: Any) -> PreTrainedModel:
    plain = empty_causal_lm(model.config)
    plain.generation_config = model.generation_config
    return plain


def _frozen_weight(part: Any, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    base = part.base_layer
    if get_bnb_param_type(base.weight):
        unpacked: Tensor = dequantize_module_weight(base).detach()
        return unpacked
    return gather(weight)


def share_weights(model: nn.Module) -> Any:
    """A copy of a model's modules that shares its tensors, also the scales of 4-bit weights.

    Adapters that are added to one copy do not affect the others.
    """
    shared: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
    for part in model.modules():
        scales = getattr(part, "quant_state", None)
        if scales is not None:
            shared[id(scales)] = scales
    return copy.deepcopy(model, shared)


def save_adapters(
    folder: Path, classifier: PreTrainedModel, state: Mapping[str, Tensor], base: dict[str, str]
) -> None:
    """Save a reward model's adapters and head beside its weights, as `peft` reads them.

    Args:
        folder: of the reward model.
        classifier: the model with its adapters.
        state: its weights by name; the head with its gain. Only those that are trained are read.
        base: what `describe_model` says of the model whose weights are frozen.
    """
    config = copy.copy(_config_of(classifier))
    config.modules_to_save = parts_above_trunk(classifier)
    config.base_model_name_or_path = base["path"]
    config.inference_mode = True
    trained = _trained(classifier, state).items()
    tensors = {f"{PEFT_PREFIX}{name}": value.cpu().contiguous() for name, value in trained}
    with new_folder(folder / FOLDER) as partial:
        config.save_pretrained(str(partial))
        save_file(tensors, partial / WEIGHTS)
        write_json(partial / BASE, {**base, "four_bits": _is_packed(classifier)})


def save_policy_adapters(
    folder: Path, model: nn.Module, gather: Callable[[Tensor], Tensor]
) -> None:
    """Write a language model's adapters into a folder, as `peft` and vLLM read them.

    `gather` makes a weight whole. Where it is a collective, all ranks call this.
    """
    adapters = get_peft_model_state_dict(
        model, model.state_dict(keep_vars=True), NAME, save_embedding_layers=False
    )
    tensors = {
        f"{PEFT_PREFIX}{name}": gather(value).cpu().contiguous() for name, value in adapters.items()
    }
    _config_of(model).save_pretrained(str(folder))
    save_file(tensors, folder / WEIGHTS)


def _is_packed(model: nn.Module) -> bool:
    return any(get_bnb_param_type(weight) for weight in model.parameters())


def _config_of(model: Any) -> LoraConfig:
    config: LoraConfig = model.peft_config[NAME]
    return config


def require_adapters(folder: str, base: dict[str, str], *, four_bits: bool = False) -> None:
    """Refuse a reward model whose adapters were not trained on these frozen weights.

    `base` is the description of the frozen model by `describe_model`.

    Raises:
        InputError: it has no adapters, or they were trained on other weights, or on these in the
            other precision.
    """
    path = Path(folder) / FOLDER / BASE
    remedy = (
        f"Train it with: rlhf train-reward --adapter lora --model {base['path']} …, or leave "
        "--lora.share-base out."
    )
    if not path.is_file():
        raise InputError(f"{folder} has no adapters to use on a shared base", remedy)
    trained_on = read_document(path, {"hash": str, "path": str})
    if trained_on["hash"] != base["hash"]:
        raise InputError(
            f"The adapters of {folder} were trained on {trained_on['path']} "
            f"({trained_on['hash']}), not on {base['path']} ({base['hash']})",
            remedy,
        )
    if trained_on.get("four_bits", False) != four_bits:
        theirs, ours = ("unquantized", "4-bit") if four_bits else ("4-bit", "unquantized")
        raise InputError(
            f"The adapters of {folder} were trained on {theirs} weights, the shared base has "
            f"{ours} ones",
            "Leave --lora.four-bit-base out, or train it with --adapter qlora."
            if four_bits
            else "Add --lora.four-bit-base, or train it with --adapter lora.",
        )


def adapter_rank(folder: str) -> int | None:
    """The rank of the adapters saved with a reward model; None without adapters."""
    path = Path(folder) / FOLDER / CONFIG
    return int(read_document(path, {"r": int})["r"]) if path.is_file() else None


def load_reward_model_on(base: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A reward model on the frozen weights of a language model, from files of `save_adapters`.

    The language model does not change. Adapters and head can be trained.

    Raises:
        InputError: the adapters cannot be read, or are incomplete.
    """
    config = load_config(folder)
    pad_token_id = config.get_text_config().pad_token_id
    classifier = put_head_on(share_weights(base.base_model), pad_token_id)
    classifier.config.reward_bias = getattr(config, "reward_bias", 0.0)
    path = Path(folder) / FOLDER
    with as_input_error(f"Cannot read the adapter {path}", COPY_AGAIN):
        adapter: Any = LoraConfig.from_pretrained(str(path))
        adapter.modules_to_save = None
        adapter.inference_mode = False
        _inject(adapter, classifier, seed=0)
        stored = load_file(path / WEIGHTS)
    state = {name.removeprefix(PEFT_PREFIX): value for name, value in stored.items()}
    mine = _trained(classifier, classifier.state_dict())
    shapes = [
        (name, value.shape, mine[name].shape)
        for name, value in state.items()
        if name in mine and value.shape != mine[name].shape
    ]
    require_whole(str(path), CONFIG, mine.keys() - state.keys(), state.keys() - mine.keys(), shapes)
    head = {name: state.pop(name) for name in list(state) if name.startswith(f"{HEAD}.")}
    reward_head(classifier).load_state_dict(
        {name.removeprefix(f"{HEAD}."): value for name, value in head.items()}
    )
    set_peft_model_state_dict(classifier, state, NAME)
    return classifier


def _trained(classifier: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters and the head of a reward model, by the names that `peft` gives them."""
    trained: dict[str, Tensor] = get_peft_model_state_dict(
        classifier, dict(state), NAME, save_embedding_layers=False
    )
    above = tuple(f"{part}." for part in parts_above_trunk(classifier))
    return trained | {name: value for name, value in state.items() if name.startswith(above)}
