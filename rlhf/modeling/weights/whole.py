"""Reads weights, and refuses files that do not match the model's config exactly.

`transformers` only logs that it initializes missing weights at random and ignores unknown ones; the
results of such a model look like any others.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError

COPY_AGAIN = "Copy or download the model again: its folder must hold whole *.safetensors files."
ADAPTER = "adapter_config.json"
HEAD = "score."
OUTPUT = ("lm_head.", "embed_out.")  # the output matrix of language models
NAMES_SHOWN = 3
QUANTIZED_BY = "compressed-tensors"  # the format of `rlhf quantize`, which vLLM reads too

Mismatch = tuple[str, Collection[int], Collection[int]]


def load_weights(
    kind: type[Any], name: str, *, new_head: bool = False, **settings: Any
) -> PreTrainedModel:
    """Load a model with all its weights.

    With `new_head` a language model gets the head of a reward model in place of its output matrix.
    `settings` are those of `from_pretrained`, with a config. Weights that `rlhf quantize` wrote are
    expanded.

    Raises:
        InputError: the weights cannot be read, or are not those that the config describes.
    """
    if (Path(name) / ADAPTER).is_file():
        raise InputError(
            f"{name} holds an adapter ({ADAPTER}), which needs the weights of another folder",
            "Merge it first (peft: merge_and_unload, then save_pretrained), and give the result.",
        )
    if stored := quantization_of(settings["config"]):
        settings["config"].quantization_config = {**stored, "dequantize": True}
    with as_input_error(f"Cannot load the weights of {name}", COPY_AGAIN):
        try:
            model, loading_info = kind.from_pretrained(
                name,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **settings,
            )
        except Exception:  # of any kind; transformers does not name a broken file
            tensor_files(Path(name))
            raise
    missing, unexpected = loading_info["missing_keys"], loading_info["unexpected_keys"]
    if new_head:
        missing = {key for key in missing if not key.startswith(HEAD)}
        unexpected = {key for key in unexpected if not key.startswith(OUTPUT)}
    missing = _with_files(Path(name), missing)
    require_whole(name, "config.json", missing, unexpected, loading_info["mismatched_keys"])
    return model  # type: ignore[no-any-return]


def tensor_files(folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Read the heads of a folder's safetensors files.

    Returns:
        for each tensor the names of the files that hold it, and the names of files that cannot be
        read and that transformers does not read either, such as an incomplete copy of the weights
        in another format.

    Raises:
        InputError: a file of the model is broken or cut short.
    """
    files: dict[str, list[str]] = {}
    unreadable = []
    needed = {SAFE_WEIGHTS_NAME, *_index_of(folder).values()}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with (
                as_input_error(f"Cannot load the weights of {path}", COPY_AGAIN),
                safe_open(path, "pt") as file,
            ):
                names = list(file.keys())
        except InputError:
            if path.name in needed:
                raise
            unreadable.append(path.name)
            continue
        for name in names:
            files.setdefault(name, []).append(path.name)
    return files, unreadable


def _index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor where several files hold a model; else empty."""
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    if not path.is_file():
        return {}
    files: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    return files


def _with_files(folder: Path, names: Collection[str]) -> list[str]:
    """Names of tensors, each with the file that should hold it where an index says so."""
    files = _index_of(folder) if names else {}
    return [f"{name} in {files[name]}" if name in files else name for name in names]


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The quantization in the config of a model that `rlhf quantize` wrote; else None."""
    quantization = getattr(config, "quantization_config", None)
    ours = isinstance(quantization, dict) and quantization.get("quant_method") == QUANTIZED_BY
    return quantization if ours else None


def require_unquantized(name: str, config: PreTrainedConfig) -> None:
    """Refuse to train a quantized model.

    Raises:
        InputError: its weights are quantized.
    """
    if quantization_of(config) is not None:
        raise InputError(
            f"{name} is quantized, and only its unquantized original can be trained",
            "Train the model that `rlhf quantize` was given, and quantize the result.",
        )


def require_whole(
    name: str,
    config: str,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[Mismatch],
) -> None:
    """Refuse weights that do not match the model.

    `config` is the file that describes the model; `mismatched` has the shapes in file and model.

    Raises:
        InputError: there are any; the message names them.
    """
    shapes = [f"{tensor} {tuple(there)} for {tuple(here)}" for tensor, there, here in mismatched]
    problems = [
        f"{problem}: {_few(names)}"
        for problem, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    if problems:
        raise InputError(
            f"The weights of {name} are not those that its {config} describes "
            f"({'; '.join(problems)})",
            "Copy or download the model again: config and weights must be saved together.",
        )


def _few(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, … {len(names)} in all"
