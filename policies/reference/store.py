"""The reference store: the original model's responses with the log-prob of every token, on disk.

outputs/train-00000.parquet ...   one ReferenceRow a row; the M samples of a prompt are adjacent
outputs/test-00000.parquet ...    the same of the test prompts
outputs/manifest.json             model, tokenizer, sampling, counts, and the hashes of every shard
end_tokens.json                   end tokens of the responses, recorded before the first one

A store may hold millions of rows. Opening it reads the manifest; rows come from disk when they are
wanted, their shard is checked against its hash first, and only the last ones stay in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from policies.reference.shards import (
    ReferenceRow,
    TopTokens,
    require_unchanged,
    rows_of,
    split_of,
    with_rewards,
)
from rlhf.errors import InputError
from rlhf.modeling.chat_template import END_TOKENS, end_token_ids, set_end_tokens
from rlhf.modeling.models import load_config
from rlhf.modeling.readers import described_kwargs, require_described_kwargs
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import on_main
from rlhf.ranks import is_main_process
from rlhf.records.documents import REMEDY, Kinds, read_document, require_kinds
from rlhf.records.fingerprints import text_hash
from rlhf.records.jsonl import write_json
from rlhf.records.parquet import ParquetRows, RowGroups
from rlhf.records.schema import Sampling, Split
from rlhf.run.rundir import RunDir

__all__ = [
    "ReferenceRow",
    "ReferenceStore",
    "TopTokens",
    "open_store",
    "read_manifest",
    "require_reference_of",
    "require_training_prompts",
]

MANIFEST = "manifest.json"
END_TOKENS_FILE = "end_tokens.json"  # beside the folder of the store
FORMAT_VERSION = 2
MANIFEST_KINDS: Kinds = {
    "format_version": int,
    "sampling": dict,
    "shards": dict,
    "model": dict,
    "reward": dict | None,
    "samples_per_prompt": int,
    "longest_prompt": int,
    "finished": int,
    "mean_log_prob": int | float,
    "stored_top_k": int | None,
    "precision": str,
    "reused": int,
    END_TOKENS: list,
}
MAX_ROWS = 10**12  # of a shard
SHARDS_CHECKED_AT_OPENING = 8  # the others are checked when first read


@dataclass(frozen=True)
class ReferenceStore:
    """All reference outputs: their folder, their manifest, and the present path of their model."""

    folder: Path
    manifest: dict[str, Any]
    model: str

    @property
    def sampling(self) -> Sampling:
        """How the reference outputs were sampled."""
        return Sampling(**self.manifest["sampling"])

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The --chat-template-kwargs with which its prompts were read."""
        return described_kwargs(self.manifest["model"])

    def load_tokenizer(self, name: str) -> PreTrainedTokenizerBase:
        """The tokenizer of a model that is trained from this store, with the store's end tokens.

        A store without end tokens was made by a version that used only the tokenizer's own one.

        Args:
            name: model folder or hub name.

        Raises:
            InputError: there is no such tokenizer, or the manifest names tokens that it lacks.
        """
        tokenizer = load_tokenizer(name, self.template_kwargs)
        end_tokens = self.manifest.get(END_TOKENS, [int(tokenizer.eos_token_id)])
        vocabulary = int(load_config(name).get_text_config().vocab_size)
        require_end_tokens(end_tokens, str(self.folder / MANIFEST), max(vocabulary, len(tokenizer)))
        set_end_tokens(tokenizer, end_tokens)
        return tokenizer

    @property
    def content_hash(self) -> str:
        """A hash over the rows of all shards; rewards, which may be added later, do not count."""
        hashes = {name: shard["hash"] for name, shard in self.manifest["shards"].items()}
        return text_hash(str(sorted(hashes.items())))

    @cached_property
    def rows(self) -> ParquetRows[ReferenceRow]:
        """All rows, training prompts first."""
        scored = self.manifest["reward"] is not None
        shards = {self.folder / name: shard for name, shard in self.manifest["shards"].items()}
        return ParquetRows(
            {path: shard["rows"] for path, shard in shards.items()},
            lambda table: rows_of(table if scored else with_rewards(table, None)),
            lambda path: require_unchanged(path, shards[path], scored=scored),
        )

    def by_prompt(self, split: Split) -> RowGroups[ReferenceRow]:
        """The rows of each prompt of a split, in the order of the store."""
        shards = self.manifest["shards"].items()
        train = sum(shard["rows"] for name, shard in shards if split_of(name) == "train")
        rows = range(train) if split == "train" else range(train, len(self.rows))
        return RowGroups(self.rows, rows, self.manifest["samples_per_prompt"])

    def check_on_main(self) -> None:
        """Check all shards in the main process, which the others believe; all processes call this.

        Raises:
            InputError: a shard is missing or was changed.
        """
        on_main(self.rows.check_all)
        self.rows.skip_checks()


def require_end_tokens(ids: Sequence[Any], file: str, vocabulary: float = math.inf) -> None:
    """Refuse end tokens that are not ids of a vocabulary of this size.

    Raises:
        InputError: names the file and the end tokens.
    """
    if not ids or not all(type(token_id) is int and 0 <= token_id < vocabulary for token_id in ids):
        raise InputError(
            f"{file} has {END_TOKENS!r} as {str(ids)[:80]}, not as token ids of its model", REMEDY
        )


def settle_end_tokens(run: RunDir, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end tokens of all responses of a stage, recorded when the stage first opens.

    Other jobs and a resumed run read the record. A stage with shards but no record was made by a
    version that ended responses only at `tokenizer.eos_token`.

    Args:
        run: the stage, open.
        tokenizer: of its model, with all end tokens.

    Raises:
        InputError: the record is broken.
    """
    path = run.path / END_TOKENS_FILE
    if path.is_file():
        end_tokens = read_document(path, {END_TOKENS: list})[END_TOKENS]
        require_end_tokens(end_tokens, str(path))
        return list(end_tokens)
    has_shards = any(run.outputs.glob("*.parquet"))
    end_tokens = [int(tokenizer.eos_token_id)] if has_shards else list(end_token_ids(tokenizer))
    if is_main_process():
        write_json(path, {END_TOKENS: end_tokens})
    return end_tokens


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of a store.

    Raises:
        InputError: no manifest or a broken one, another format, or truncated sampling.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{folder} is not a reference store: it has no {MANIFEST}",
            "Make one: rlhf reference --prompts DIR --model M --out R",
        )
    manifest = read_document(path, MANIFEST_KINDS)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{folder} has format {manifest.get('format_version')}, not {FORMAT_VERSION}",
            "Make the store again with rlhf reference.",
        )
    if not _checked_sampling(manifest, path).is_untruncated:
        raise InputError(
            f"The outputs in {folder} were sampled with top_p or top_k: they give no KL",
            "Make the store again with rlhf reference, which samples the whole distribution.",
        )
    return manifest


def _checked_sampling(manifest: dict[str, Any], path: Path) -> Sampling:
    """Validate a manifest and return its sampling settings.

    Raises:
        InputError: one is not.
    """
    needed: dict[str, tuple[str, ...]] = {"model": ("path", "hash", "tokenizer")}
    if manifest["reward"] is not None:
        needed["reward"] = ("path", "hash")
    for name, keys in needed.items():
        kinds = {key: str for key in keys if manifest[name][key]}
        require_kinds(manifest[name], kinds, f"{path} ({name})")
    for name, shard in manifest["shards"].items():
        location = f"{path} (shard {name[:80]})"
        require_kinds({name: shard}, {name: dict}, location)
        require_kinds(shard, {"rows": int, "hash": str}, location)
        if not 0 <= shard["rows"] <= MAX_ROWS or not shard["hash"] or Path(name).name != name:
            raise InputError(f"{location} is no shard of a store", REMEDY)
    if manifest["samples_per_prompt"] < 1:
        raise InputError(f"{path} has no samples of a prompt", REMEDY)
    for name in needed:
        require_described_kwargs(manifest[name], f"{path} ({name})")
    if END_TOKENS in manifest:
        require_end_tokens(manifest[END_TOKENS], str(path))
    try:
        return Sampling.from_json(manifest["sampling"])
    except InputError as error:
        raise InputError(f"{path}: {error.problem}", REMEDY) from None


def open_store(folder: Path, model: str | None = None) -> ReferenceStore:
    """Open a store; its rows are read, and checked, on first use.

    Args:
        folder: of the store.
        model: folder of the model that made it; by default the path in the manifest.

    Raises:
        InputError: the manifest cannot be used, or a shard is missing or, among the first ones,
            was changed since the store was written.
    """
    manifest = read_manifest(folder)
    store = ReferenceStore(folder, manifest, model or manifest["model"]["path"])
    present = {path.name for path in folder.iterdir()}
    for number, name in enumerate(store.manifest["shards"]):
        if number < SHARDS_CHECKED_AT_OPENING or name not in present:
            store.rows.check(folder / name)
    return store


def require_reference_of(store: ReferenceStore, model: dict[str, str]) -> None:
    """Refuse a store that was made by another model or tokenizer.

    Args:
        store: the reference outputs.
        model: the present model, as `rlhf.modeling.models.describe_model` describes it.

    Raises:
        InputError: weights or tokenizer differ from the manifest.
    """
    made_by = store.manifest["model"]
    for key, label in (("tokenizer", "tokenizer or chat template"), ("hash", "weights")):
        if made_by[key] != model[key]:
            raise InputError(
                f"The reference outputs were made by {made_by['path']}, whose {label} differ from "
                f"those of {model['path']} ({made_by[key]} ≠ {model[key]})",
                f"Store this model's outputs: rlhf reference --model {model['path']} …",
            )


def require_training_prompts(store: ReferenceStore) -> None:
    """Refuse a store whose prompts are all of the test split.

    Raises:
        InputError: says how to make one that has others.
    """
    if not store.by_prompt("train"):
        raise InputError(
            f"{store.folder} has no prompts of the split 'train', only "
            f"{len(store.by_prompt('test'))} of 'test'",
            "Make a store of training prompts: rlhf reference --prompts DIR …",
        )
