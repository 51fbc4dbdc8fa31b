"""The reference store: what the original model says, with the log-prob of every token, on disk.

outputs/shard-00000.parquet ...   one ReferenceRow a row
outputs/manifest.json             model, tokenizer, sampling, counts, and the hash of every shard
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.errors import InputError
from rlhf.fingerprints import file_hash, text_hash
from rlhf.jsonl import write_json
from rlhf.records import Prompt, Sampling, Split

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("messages", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("finished", pa.bool_()),
        ("reused", pa.bool_()),
        ("log_probs", pa.list_(pa.float32())),
        ("log_probs_at_1", pa.list_(pa.float32())),
        ("entropy", pa.list_(pa.float32())),
        ("reward", pa.float32()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """One reference output y0.

    `log_probs` are taken at the sampling temperature, `log_probs_at_1` at temperature 1; both,
    and `entropy`, in nats, one number for each of `response_ids`. `reused` tells that the
    response was already in the ranking dataset. `reward` is r(y0), or None while no reward model
    has scored it.
    """

    prompt: Prompt
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    finished: bool
    reused: bool
    log_probs: list[float]
    log_probs_at_1: list[float]
    entropy: list[float]
    reward: float | None = None

    def to_columns(self) -> dict[str, Any]:
        """This row as the Parquet schema has it."""
        values = {key: value for key, value in vars(self).items() if key != "prompt"}
        return values | {
            "prompt_id": self.prompt.id,
            "split": self.prompt.split,
            "source": self.prompt.source,
            "messages": json.dumps(self.prompt.chat, ensure_ascii=False),
        }

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> Self:
        """Read a row of the Parquet schema."""
        prompt = Prompt.from_json(
            {
                "id": columns["prompt_id"],
                "messages": json.loads(columns["messages"]),
                "split": columns["split"],
                "source": columns["source"],
            }
        )
        names = set(cls.__dataclass_fields__) - {"prompt"}
        return cls(prompt=prompt, **{name: columns[name] for name in names})


@dataclass(frozen=True)
class ReferenceStore:
    """All reference outputs and their manifest."""

    rows: tuple[ReferenceRow, ...]
    manifest: dict[str, Any]

    @property
    def sampling(self) -> Sampling:
        """How the reference outputs were sampled."""
        return Sampling(**self.manifest["sampling"])

    @property
    def content_hash(self) -> str:
        """A hash over all shards."""
        return text_hash(str(sorted(self.manifest["shards"].items())))

    def by_prompt(self, split: Split) -> list[tuple[ReferenceRow, ...]]:
        """The rows of each prompt of a split, in the order of the store."""
        groups: dict[str, list[ReferenceRow]] = {}
        for row in self.rows:
            if row.prompt.split == split:
                groups.setdefault(row.prompt.id, []).append(row)
        return [tuple(group) for group in groups.values()]


def shard_path(folder: Path, index: int) -> Path:
    """The file of one shard."""
    return folder / f"shard-{index:05d}.parquet"


def write_shard(folder: Path, index: int, rows: Sequence[ReferenceRow]) -> None:
    """Write one shard, atomically."""
    table = pa.Table.from_pylist([row.to_columns() for row in rows], schema=SCHEMA)
    partial = folder / f".shard-{index:05d}.partial"
    pq.write_table(table, partial)
    partial.replace(shard_path(folder, index))


def read_shard(path: Path) -> list[ReferenceRow]:
    """Read the rows of one shard."""
    return [ReferenceRow.from_columns(columns) for columns in pq.read_table(path).to_pylist()]


def write_manifest(
    folder: Path,
    *,
    model: dict[str, str],
    reward: dict[str, str] | None,
    sampling: Sampling,
    samples_per_prompt: int,
    precision: str,
    attention: str,
) -> dict[str, Any]:
    """Count and hash the shards and write the manifest that makes the store complete."""
    shards = sorted(folder.glob("shard-*.parquet"))
    rows = [row for shard in shards for row in read_shard(shard)]
    tokens = sum(len(row.response_ids) for row in rows)
    manifest = {
        "format_version": FORMAT_VERSION,
        "model": model,
        "reward": reward,
        "sampling": asdict(sampling),
        "samples_per_prompt": samples_per_prompt,
        "precision": precision,
        "attention": attention,
        "prompts": len({row.prompt.id for row in rows}),
        "rows": len(rows),
        "reused": sum(row.reused for row in rows),
        "finished": sum(row.finished for row in rows),
        "mean_length": tokens / len(rows),
        "mean_log_prob": sum(sum(row.log_probs) for row in rows) / tokens,
        "shards": {shard.name: file_hash(shard) for shard in shards},
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def open_store(folder: Path) -> ReferenceStore:
    """Read a store and check that nothing has been changed, added or lost since it was written.

    Raises:
        InputError: no manifest, another format, truncated sampling, or a shard that differs from
            the manifest.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{folder} is not a reference store: it has no {MANIFEST}",
            "Make one: rlhf reference --prompts DIR --model M --out R",
        )
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{folder} has format {manifest.get('format_version')}, not {FORMAT_VERSION}",
            "Make the store again with rlhf reference.",
        )
    if not Sampling(**manifest["sampling"]).is_untruncated:
        raise InputError(
            f"The outputs in {folder} were sampled with top_p or top_k: they give no KL",
            "Make the store again with rlhf reference, which samples the whole distribution.",
        )
    for name, expected in manifest["shards"].items():
        shard = folder / name
        if not shard.is_file() or file_hash(shard) != expected:
            raise InputError(
                f"{shard} is missing or was changed after the store was written",
                "Make the store again with rlhf reference.",
            )
    rows = tuple(row for name in sorted(manifest["shards"]) for row in read_shard(folder / name))
    return ReferenceStore(rows, manifest)


def require_reference_of(store: ReferenceStore, model: dict[str, str]) -> None:
    """Refuse a store that another model or tokenizer has made.

    Args:
        store: the reference outputs.
        model: what `rlhf.models.describe_model` says of the model in hand.

    Raises:
        InputError: weights or tokenizer differ from the manifest.
    """
    made_by = store.manifest["model"]
    for key, what in (("tokenizer", "tokenizer or chat template"), ("hash", "weights")):
        if made_by[key] != model[key]:
            raise InputError(
                f"The reference outputs were made by {made_by['path']}, whose {what} differ from "
                f"those of {model['path']} ({made_by[key]} ≠ {model[key]})",
                f"Store this model's outputs: rlhf reference --model {model['path']} …",
            )
