"""Loads and saves models: the only `from_pretrained` of a model in the project.

A reward model is an `AutoModelForSequenceClassification` with one label. Its config carries
`reward_bias`, the constant that plain `from_pretrained` does not add; `rlhf` adds it wherever it
scores.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from rlhf.diagnose import as_input_error
from rlhf.endpoints.hub import require_hub
from rlhf.errors import InputError
from rlhf.modeling.attention.matmul import use_products
from rlhf.modeling.chat_template import add_end_tokens
from rlhf.modeling.heads import (
    CLASSIFIER,
    HEAD,
    architecture,
    empty_classifier,
    head_name,
    parts_above_trunk,
    reads_pairs,
    reward_head,
    start_head,
    unused_positions,
    without_quantization,
)
from rlhf.modeling.model_card import Pipeline, card_of
from rlhf.modeling.pairs import require_padding_ignored
from rlhf.modeling.tokens import describe_tokenizer, load_tokenizer
from rlhf.modeling.weights.stored import read_for_shards
from rlhf.modeling.weights.whole import load_weights, quantization_of, require_unquantized
from rlhf.parallel.distributed import on_main
from rlhf.parallel.sharding import Held
from rlhf.parallel.tensor_parallel import require_trainable_parts, tensor_parallel_options
from rlhf.parallel.weight_files import WeightFiles
from rlhf.ranks import is_main_process
from rlhf.records.fingerprints import known_folder_hash, take_folder_hash, text_hash
from rlhf.records.jsonl import new_folder
from rlhf.run.loops.promotion import is_loop, policy_stage, promoted_policy
from rlhf.run.rundir import RunDir, require_done

WEIGHTS = ("*.safetensors", "*.bin", "member-*/*.safetensors")  # an ensemble holds members
RESULTS = ("policy", "model")  # in folders of stages
FETCH_AGAIN = "Check the name and the connection, or download the model and give its folder."
GIVE_A_MODEL = (
    "Give the --out of a training, a Hugging Face model folder, or a hub name with its owner, such "
    "as HuggingFaceTB/SmolLM2-135M-Instruct."
)
STAND_INS = ("quantize", "distill")  # their result takes the place of a training's

CLASSIFIERS = "Classification"  # of whole texts, of every token, of images


def load_config(name: str) -> PreTrainedConfig:
    """Read a model's config and set every dropout to zero, so that only sampling is random.

    Raises:
        InputError: there is no such model, on disk or on the hub, or its config is broken.
    """
    _require_there(name)
    require_hub(name)
    with as_input_error(f"Cannot read the model {name}", FETCH_AGAIN):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    for key, value in vars(config).items():
        if key.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def _require_there(name: str, more: str = "") -> None:
    """Refuse a path without a model; `more` says what else may be given. Hub names pass."""
    folder, file = Path(name), "config.json"
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or folder.parent.is_dir()
    if looks_local and not (folder / file).is_file():
        reason = f"no {file} in it" if folder.is_dir() else "no such folder"
        inside = next((result for result in RESULTS if (folder / result / file).is_file()), "")
        remedy = f"Give the model in it: {folder / inside}" if inside else GIVE_A_MODEL + more
        raise InputError(f"{name} is not a model ({reason})", remedy)


def model_folder(name: str, stage: str, result: str) -> str:
    """The model folder: the result of the finished stage in folder `name`, else `name` itself.

    Raises:
        InputError: `name` is a stage that did not finish, or another stage.
    """
    if RunDir(Path(name)).stage_file.is_file():
        recorded = RunDir(Path(name)).read_stage().get("stage")
        made_by = recorded if recorded in STAND_INS else stage
        return str(require_done(Path(name), made_by, result).path / result)
    if stage == "reward":
        _require_there(name, " Also: signal:package.module:function.")
    return name


def policy_folder(name: str, flag: str = "") -> str:
    """The folder of a language model: the result of a run that trained one, else `name` itself.

    Of a loop it is the promoted policy.

    Raises:
        InputError: `name` is a stage that did not finish, or another stage; says it of `flag`.
    """
    if is_loop(Path(name)):
        return promoted_policy(Path(name))
    stage = policy_stage(RunDir(Path(name)), flag)
    return model_folder(name, stage, "model" if stage == "sft" else "policy") if stage else name


def context_length(config: PreTrainedConfig) -> int | None:
    """The maximum number of tokens that a model reads; None if its config sets no limit.

    RoBERTa and its kin begin to count positions after the id of their padding token.
    """
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit and limit - (unused_positions(config) if reads_pairs(config) else 0)


@contextmanager
def in_memory(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Use a model within the block, then free its weights."""
    try:
        yield model
    finally:
        nn.Module.to(model, "meta")


def load_causal_lm(
    name: str,
    dtype: torch.dtype = torch.float32,
    quantization: QuantizationConfigMixin | None = None,
    *,
    held: Held = "whole",
    trained: bool = False,
) -> PreTrainedModel:
    """Load a language model.

    `quantization` of the linear layers takes the place of `dtype`. With `held="parts"` each process
    of the group holds a part of every matrix, and all must call the model with the same inputs at
    the same time. With `held="files"` all processes call this, and weights stay in the files until
    FSDP shards the model, or where every process cannot read its part, in the main one.

    Raises:
        InputError: there is no such model, its weights are incomplete, it is a reward model, or
            transformers cannot split it.
    """
    config = load_config(name)
    if held == "parts" and trained:
        require_trainable_parts(name, config)
    if architecture(config).endswith(CLASSIFIER):
        raise InputError(
            f"{name} is a classifier ({architecture(config)}), not a language model",
            "Give the language model, not the reward model.",
        )
    return _load(AutoModelForCausalLM, name, config, dtype, quantization, held=held)


def new_reward_model(
    name: str,
    pad_token_id: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    quantization: QuantizationConfigMixin | None = None,
    *,
    held: Held = "whole",
) -> PreTrainedModel:
    """A reward model to train: a language model with a fresh head, or a trained reward model.

    A fresh head is started by `start_head`. A trained one is kept, and its `reward_bias` stays in
    the config.

    What is above the trunk is float32, and whole in every process; otherwise as `load_causal_lm`.

    Raises:
        InputError: there is no such model, its weights are incomplete, it is a classifier with
            another number of labels or an encoder without a trained head, or it cannot be split.
    """
    is_trained = is_reward_model(name)
    config = _classifier_config(name, pad_token_id)
    empty = empty_classifier(without_quantization(config))
    if not is_trained and head_name(empty) != HEAD:
        raise InputError(
            f"{name} is an encoder without a trained head ({architecture(config)})",
            "Start from a decoder, or from a classifier with one label.",
        )
    if held == "parts":
        require_trainable_parts(name, config)
    kind = _exact_head(empty) if is_trained else AutoModelForSequenceClassification
    if isinstance(quantization, BitsAndBytesConfig):
        quantization.llm_int8_skip_modules += parts_above_trunk(empty)  # also applies to 4 bits
    model = _load(
        kind,
        name,
        config,
        dtype,
        quantization,
        held=held,
        new_head=not is_trained,
    )
    if not is_trained:
        if is_main_process():
            head = ", ".join(key for key, _ in model.named_parameters() if key.startswith(HEAD))
            sys.stderr.write(f"{name} has no reward head: {head} is new.\n")
        start_head(reward_head(model).float(), seed)
    return model


def is_reward_model(name: str) -> bool:
    """True for a classifier with one label, whose head is trained; False for a language model.

    Raises:
        InputError: there is no such model, or it is another classifier.
    """
    config = load_config(name)
    if not architecture(config).endswith(CLASSIFIERS):
        return False
    _require_one_label(name, config, "Give a language model, or a classifier with one label.")
    return True


def _require_one_label(name: str, config: PreTrainedConfig, remedy: str) -> None:
    kind = architecture(config)
    if not kind.endswith(CLASSIFIER) or config.num_labels != 1:
        message = f"{name} is not a reward model ({kind}, {config.num_labels} labels)"
        raise InputError(message, remedy)


def _exact_head(empty: PreTrainedModel) -> type[PreTrainedModel]:
    """A classifier's class that loads its head in float32 even if the trunk is bf16."""
    plain, above = type(empty), parts_above_trunk(empty)
    exact = {*(plain._keep_in_fp32_modules_strict or ()), *(rf"^{name}\." for name in above)}
    # transformers looks up attention support in the module of a class
    attributes = {"_keep_in_fp32_modules_strict": exact, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), attributes)


def load_reward_model(name: str, *, held: Held = "whole") -> PreTrainedModel:
    """Load a trained reward model; `held` as in `load_causal_lm`.

    Raises:
        InputError: there is no such model, its weights are incomplete, it does not have one output,
            or transformers cannot split it.
    """
    config = load_config(name)
    _require_one_label(
        name, config, "Train one: rlhf train-reward --rankings DIR --model M --out R"
    )
    config = _classifier_config(name, config.get_text_config().pad_token_id)
    return _load(AutoModelForSequenceClassification, name, config, torch.float32, held=held)


def require_reward_model(name: str) -> None:
    """Refuse a folder that `load_reward_model` would refuse, without reading its weights.

    Raises:
        InputError: there is no such model, or its weights are not those that the config describes.
    """
    config = _classifier_config(name, load_config(name).get_text_config().pad_token_id)
    kind = AutoModelForSequenceClassification
    load_weights(kind, name, config=config, dtype=torch.float32, device_map="meta")


def _classifier_config(name: str, pad_token_id: int) -> PreTrainedConfig:
    config = load_config(name)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    return config


def _load(
    kind: type[Any],
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    quantization: QuantizationConfigMixin | None = None,
    *,
    held: Held = "whole",
    new_head: bool = False,
) -> PreTrainedModel:
    parts = tensor_parallel_options(name, config) if held == "parts" else {}
    parts |= {"config": config, "dtype": dtype, "quantization_config": quantization}
    is_plain = not (quantization or quantization_of(config))

    def read(is_empty: bool = False) -> PreTrainedModel:
        device = {"device_map": "meta"} if is_empty else {}
        model = load_weights(kind, name, new_head=new_head, **parts, **device)
        if reads_pairs(config) and not is_empty:
            require_padding_ignored(name, model)
        return model

    if held == "files" and is_plain:
        model = read_for_shards(name, kind, config, read, new_head=new_head)
    else:
        model = read()
    if not reads_pairs(config):
        use_products(model)
    return model


def model_fingerprint(name: str) -> str:
    """A hash that changes when the model's weights change."""
    if Path(name).is_dir():
        return known_folder_hash(Path(name), WEIGHTS)
    return text_hash(f"{name}@{load_config(name)._commit_hash}")


def describe_model(name: str, given: dict[str, Any] | None = None) -> dict[str, str]:
    """Path, weights fingerprint and tokenizer fingerprint of a model, as manifests record them.

    Raises:
        InputError: there is no such model, its tokenizer is missing or another model's, or it
            records other --chat-template-kwargs than `given`.
    """
    config, tokenizer = load_config(name).get_text_config(), load_tokenizer(name, given)
    rows = getattr(config, "vocab_size", None) or 0
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"The tokenizer of {name} knows {tokenizer.vocab_size} tokens, its model only {rows}",
            "Copy or download the model again: the tokenizer is another model's.",
        )
    return {"path": name, "hash": model_fingerprint(name), **describe_tokenizer(tokenizer)}


def describe_for_all(name: str, given: dict[str, Any] | None = None) -> dict[str, str]:
    """The main process's `describe_model`, whose fingerprint the others take over.

    Raises:
        InputError: as `describe_model`, in every process.
    """
    description = on_main(lambda: describe_model(name, given))
    take_folder_hash(Path(name), WEIGHTS, description["hash"])
    return description


def require_trainable(name: str) -> None:
    """Refuse to train a model that `rlhf quantize` wrote.

    Raises:
        InputError: its weights are quantized, or there is no such model.
    """
    require_unquantized(name, load_config(name))


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
    files: WeightFiles | None = None,
) -> None:
    """Save a plain Hugging Face folder atomically; inside a stage's folder with a model card.

    `files` write the weights of a sharded model; all processes then call this.
    """
    if files and not files.accelerator.is_main_process:
        files.write(folder)
        return
    with new_folder(folder) as partial:
        add_end_tokens(model, tokenizer)
        model.save_pretrained(partial, state_dict={} if files else state)
        if files:
            files.write(partial)
        tokenizer.save_pretrained(partial)
        is_policy = model.get_output_embeddings() is not None
        pipeline: Pipeline = "text-generation" if is_policy else "text-classification"
        if card := card_of(RunDir(folder.parent), pipeline):
            (partial / "README.md").write_text(card, encoding="utf-8")
