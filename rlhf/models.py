"""Loading and saving models: the only `from_pretrained` of a model in the project.

A reward model is an `AutoModelForSequenceClassification` with one label. Its config carries
`reward_bias`, the constant that plain `from_pretrained` does not add; `rlhf` adds it wherever it
scores.
"""

import math
from pathlib import Path
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from rlhf.attention import use_products
from rlhf.chat_template import tell_end_tokens
from rlhf.errors import InputError
from rlhf.fingerprints import folder_hash, text_hash
from rlhf.jsonl import new_folder
from rlhf.model_card import model_card
from rlhf.ranks import world_size
from rlhf.rundir import RunDir, require_done
from rlhf.tokens import describe_tokenizer, load_tokenizer
from rlhf.urls import open_url

WEIGHTS = ("*.safetensors", "*.bin", "member-*/*.safetensors")  # an ensemble holds members
RESULTS = ("policy", "model")  # in folders of stages
HUB_SECONDS = 10
CLASSIFIER = "ForSequenceClassification"
SUMMED_AGAIN = "replicated_with_grad_allreduce"


def load_config(name: str) -> PreTrainedConfig:
    """Read a model's config with every dropout at zero: sampling is the only randomness we want.

    Raises:
        InputError: `name` is neither a model folder nor a model on the hub.
    """
    looks_local = (
        name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).parent.is_dir()
    )
    if looks_local and not (Path(name) / "config.json").is_file():
        found = "no config.json in it" if Path(name).is_dir() else "no such folder"
        inside = next((one for one in RESULTS if (Path(name) / one / "config.json").is_file()), "")
        raise InputError(
            f"{name} is not a model ({found})",
            f"Give the model in it: {Path(name) / inside}"
            if inside
            else "Give a Hugging Face model folder, or a hub name such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct. A function of your own is "
            "signal:package.module:function.",
        )
    try:
        _require_hub(name)
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"Cannot read the model {name} ({str(error).splitlines()[0]})",
            "Check the name and the connection, or download the model and give its folder.",
        ) from None
    for key, value in vars(config).items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def _require_hub(name: str) -> None:
    """Ask the hub once, where its library would ask for 23 seconds, for what is not on this disk.

    Raises:
        InputError: the hub does not answer.
    """
    on_disk = Path(name).is_dir() or try_to_load_from_cache(name, "config.json")
    if on_disk or constants.is_offline_mode():
        return
    try:
        open_url(Request(constants.ENDPOINT, method="HEAD"), timeout_seconds=HUB_SECONDS).close()
    except HTTPError:
        return  # it has answered
    except OSError as error:
        if isinstance(getattr(error, "reason", None), SSLError):
            return  # its library may know certificates that Python does not
        raise InputError(
            f"{name} is no folder here, and the hub does not answer ({constants.ENDPOINT})",
            "Check the name and the connection, or download the model and give its folder.",
        ) from None


def model_folder(name: str, stage: str, result: str) -> str:
    """The model behind `name`: the result of a finished stage of ours, else `name` itself.

    Raises:
        InputError: `name` is a stage that did not finish or is another stage's.
    """
    if RunDir(Path(name)).stage_file.is_file():
        return str(require_done(Path(name), stage, result).path / result)
    return name


def policy_folder(name: str) -> str:
    """The language model behind `name`: what a finished `rlhf ppo` or `rlhf sft` made, else `name`.

    Raises:
        InputError: `name` is a stage that did not finish or is another one.
    """
    stage = "sft" if RunDir(Path(name)).read_stage().get("stage") == "sft" else "ppo"
    return model_folder(name, stage, {"ppo": "policy", "sft": "model"}[stage])


def load_causal_lm(
    name: str,
    dtype: torch.dtype = torch.float32,
    quantization: QuantizationConfigMixin | None = None,
    *,
    together: bool = False,
    trained: bool = False,
) -> PreTrainedModel:
    """Load a language model.

    Args:
        name: model folder or hub name.
        dtype: of the weights.
        quantization: how the linear layers are packed instead.
        together: each process of the group holds a part of every matrix (tensor parallelism), and
            all must ask the model the same at the same time.
        trained: they will train it.

    Raises:
        InputError: there is no such model, it has no weights, it is a reward model, or nobody has
            said how to divide it.
    """
    config = load_config(name)
    if together and trained:
        _require_trainable(name, config)
    if _architecture(config).endswith(CLASSIFIER):
        raise InputError(
            f"{name} is a classifier ({_architecture(config)}), a language model is wanted here",
            "Give the language model, not the reward model.",
        )
    return _load(AutoModelForCausalLM, name, config, dtype, quantization, together=together)


def new_reward_model(
    name: str,
    pad_token_id: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    quantization: QuantizationConfigMixin | None = None,
    *,
    together: bool = False,
) -> PreTrainedModel:
    """Put a fresh scalar head on a language model.

    Its weight ~ N(0, std 1/√(d+1)), as the code of arXiv 2009.01325 has it.

    Args:
        name: model folder or hub name.
        pad_token_id: stored in the config.
        seed: of the head.
        dtype: of the weights; the head's are float32.
        quantization: how the linear layers are packed instead.
        together: each process of the group holds a part of every matrix, as in `load_causal_lm`;
            the head is whole.

    Raises:
        InputError: there is no such model, or it cannot be divided so.
    """
    config = _classifier_config(name, pad_token_id)
    if together:
        _require_trainable(name, config)
    kind = AutoModelForSequenceClassification
    model = _load(kind, name, config, dtype, quantization, together=together)
    start_head(reward_head(model).float(), seed)
    return model


def start_head(head: nn.Linear, seed: int) -> None:
    """Give a scalar head its first weights."""
    generator = torch.Generator().manual_seed(seed)
    std = 1 / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(torch.empty(head.weight.shape).normal_(std=std, generator=generator))


def empty_reward_model(config: PreTrainedConfig, bias: float) -> PreTrainedModel:
    """A plain float32 reward model without storage: what to save weights by, whoever holds them.

    Args:
        config: of the trained model; how that one packs its weights or attends is left behind.
        bias: what scoring adds to the head's output.
    """
    plain = _plain(config)
    plain.reward_bias = bias
    return _empty(AutoModelForSequenceClassification, plain)


def empty_causal_lm(config: PreTrainedConfig) -> PreTrainedModel:
    """The same for a language model."""
    return _empty(AutoModelForCausalLM, _plain(config))


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    plain = type(config).from_dict(config.to_dict())
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def _empty(kind: type[Any], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    return model


def put_head_on(trunk: PreTrainedModel, pad_token_id: int) -> PreTrainedModel:
    """A reward model on a trunk that is there, with a float32 head that says 0.

    Args:
        trunk: the base model of a language model; it is not copied, and its config changes.
        pad_token_id: stored in the config.
    """
    trunk.config.num_labels = 1
    trunk.config.get_text_config().pad_token_id = pad_token_id
    model = _empty(AutoModelForSequenceClassification, _plain(trunk.config))
    setattr(model, model.base_model_prefix, trunk)
    model.config = trunk.config  # one config says how all layers attend
    head = reward_head(model).to_empty(device="cpu")
    with torch.no_grad():
        for value in head.parameters():
            value.zero_()
    return model


def load_reward_model(name: str, *, together: bool = False) -> PreTrainedModel:
    """Load a trained reward model; `together` as in `load_causal_lm`.

    Raises:
        InputError: there is no such model, it has not exactly one output, or nobody has said how to
            divide it.
    """
    config = load_config(name)
    if not _architecture(config).endswith(CLASSIFIER) or config.num_labels != 1:
        raise InputError(
            f"{name} is not a reward model ({_architecture(config)}, {config.num_labels} labels)",
            "Train one: rlhf train-reward --rankings DIR --model M --out R",
        )
    config = _classifier_config(name, config.get_text_config().pad_token_id)
    kind = AutoModelForSequenceClassification
    return _load(kind, name, config, torch.float32, together=together)


def _classifier_config(name: str, pad_token_id: int) -> PreTrainedConfig:
    config = load_config(name)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    return config


def _architecture(config: PreTrainedConfig) -> str:
    return str((config.architectures or ["?"])[0])


def _load(
    kind: type[Any],
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    quantization: QuantizationConfigMixin | None = None,
    *,
    together: bool = False,
) -> PreTrainedModel:
    parts: dict[str, Any] = {}
    if together:
        if not getattr(config.get_text_config(), "base_model_tp_plan", None):
            raise InputError(
                f"transformers has no plan to divide the matrices of {name} "
                f"({type(config).__name__})",
                "Leave --tensor-parallel out; each process then holds the model.",
            )
        heads = _heads_with_keys(config)
        if heads % world_size():
            raise InputError(
                f"{name} has {heads} heads with keys of their own, which {world_size()} processes "
                "cannot share out",
                f"Use a number of processes that divides {heads}.",
            )
        parts["distributed_config"] = DistributedConfig(tp_plan="auto")
    try:
        model: PreTrainedModel = kind.from_pretrained(
            name, config=config, dtype=dtype, quantization_config=quantization, **parts
        )
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"Cannot load the weights of {name} ({str(error).splitlines()[0]})",
            "Copy or download the model again: its folder must hold whole *.safetensors files.",
        ) from None
    use_products(model)
    return model


def _require_trainable(name: str, config: PreTrainedConfig) -> None:
    """Per-head norms: transformers sums their gradients over processes again in every pass."""
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    if SUMMED_AGAIN in plan.values():
        raise InputError(
            f"{name} ({type(config).__name__}) has norms within attention heads, whose gradients "
            "transformers adds up wrongly over several passes",
            "Leave --tensor-parallel out; --sharding fsdp divides it, too.",
        )


def _heads_with_keys(config: PreTrainedConfig) -> int:
    text: Any = config.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def reward_head(model: nn.Module) -> nn.Linear:
    """The scalar head of a reward model.

    Raises:
        InputError: the architecture keeps its head under a name we do not know.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"{type(model).__name__} has no linear head `score`",
            "Use a decoder model: Llama, Qwen, Mistral, Gemma, GPT-NeoX and their kin have one.",
        )
    return head


def model_fingerprint(name: str) -> str:
    """A hash that changes when the model's weights change."""
    folder = Path(name)
    if folder.is_dir():
        return folder_hash(folder, WEIGHTS)
    return text_hash(f"{name}@{load_config(name)._commit_hash}")


def describe_model(name: str, given: dict[str, Any] | None = None) -> dict[str, str]:
    """Path, weights fingerprint and tokenizer fingerprint of a model, as manifests record them.

    Raises:
        InputError: there is no such model, or no tokenizer beside it; or it records other
            --chat-template-kwargs than those `given`.
    """
    load_config(name)
    tokenizer = describe_tokenizer(load_tokenizer(name, given))
    return {"path": name, "hash": model_fingerprint(name), **tokenizer}


def require_same_tokenizer(first: dict[str, str], second: dict[str, str]) -> None:
    """Refuse two models that read text differently.

    Raises:
        InputError: the fingerprints of tokenizer and chat template differ.
    """
    if first["tokenizer"] != second["tokenizer"]:
        raise InputError(
            f"{first['path']} and {second['path']} have different tokenizers or chat templates "
            f"({first['tokenizer']}, {second['tokenizer']})",
            "Train the reward model from the same base model as the policy, with the same "
            "--chat-template-kwargs: rlhf train-reward --model POLICY_MODEL …",
        )


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: dict[str, Any] | None = None,
) -> None:
    """Save a plain Hugging Face folder, atomically; in a stage's folder with a model card."""
    with new_folder(folder) as partial:
        tell_end_tokens(model, tokenizer)
        model.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
        stage = RunDir(folder.parent).read_stage()
        if stage:
            (partial / "README.md").write_text(model_card(stage), encoding="utf-8")
