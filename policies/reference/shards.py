"""The Parquet files of a reference store: a shard is a file, a row one reference output y0."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float, Int
from numpy import ndarray

from rlhf.errors import InputError
from rlhf.records.fingerprints import text_hash
from rlhf.records.jsonl import new_file
from rlhf.records.schema import Prompt, Split

ROWS_READ_AT_ONCE = 32

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
        ("top_ids", pa.list_(pa.int32())),
        ("top_log_probs", pa.list_(pa.float32())),
        ("log_sum_exp", pa.list_(pa.float32())),
    ]
)
TOP_COLUMNS = ("top_ids", "top_log_probs", "log_sum_exp")


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The K most likely tokens at each of R places of a response, at the sampling temperature.

    The logits come back as z = τ (log-prob + log Σ exp(z / τ)).
    """

    ids: Int[ndarray, "R K"]
    log_probs: Float[ndarray, "R K"]
    log_sum_exp: Float[ndarray, " R"]


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """One reference output y0.

    `log_probs` are taken at the sampling temperature, `log_probs_at_1` at temperature 1; both,
    and `entropy`, in nats, one number for each of `response_ids`. `reused` tells that the
    response was already in the ranking dataset. `reward` is r(y0), or None while no reward model
    has scored it. `top` is there where --store-top-k asked for it.
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
    top: TopTokens | None = field(default=None, compare=False)

    def to_columns(self) -> dict[str, Any]:
        """This row as the Parquet schema has it."""
        values = {key: value for key, value in vars(self).items() if key not in ("prompt", "top")}
        if self.top is not None:
            values["top_ids"] = self.top.ids.ravel()
            values["top_log_probs"] = self.top.log_probs.ravel()
            values["log_sum_exp"] = self.top.log_sum_exp
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


def shard_name(split: Split, number: int) -> str:
    """The file name of one shard; `datasets` reads the split from it, too."""
    return f"{split}-{number:05d}.parquet"


def split_of(name: str) -> str:
    """The split that a shard is part of."""
    return name.partition("-")[0]


def write_shard(path: Path, rows: Sequence[ReferenceRow], reward: str | None) -> None:
    """Write one shard, atomically.

    Args:
        path: the file.
        rows: what it will hold.
        reward: the `reward_key` of what gave the rows their rewards; None when they have none.
    """
    table = pa.Table.from_pylist([row.to_columns() for row in rows], schema=SCHEMA)
    write_table(path, table, reward)


def write_table(path: Path, table: pa.Table, reward: str | None) -> None:
    """Write the rows of one shard, atomically, and which reward they have."""
    marked = table.replace_schema_metadata({"reward": reward or ""})
    with new_file(path) as partial:
        pq.write_table(marked, partial, row_group_size=ROWS_READ_AT_ONCE)


def read_table(path: Path) -> pa.Table:
    """All columns of one shard."""
    return pq.ParquetFile(path).read()


def reward_of(path: Path) -> str | None:
    """The `reward_key` of what gave a shard its rewards; None when it has none."""
    marks = pq.ParquetFile(path).schema_arrow.metadata or {}
    return marks.get(b"reward", b"").decode() or None


def with_rewards(table: pa.Table, rewards: Sequence[float] | None) -> pa.Table:
    """The same rows with these rewards, or with none."""
    values = pa.nulls(len(table)) if rewards is None else pa.array(rewards)
    index = table.schema.get_field_index("reward")
    return table.set_column(index, "reward", values.cast(pa.float32()))


def rows_of(table: pa.Table) -> list[ReferenceRow]:
    """The rows of a shard, or of a part of it."""
    plain = table.drop_columns(list(TOP_COLUMNS)).to_pylist()
    return [
        ReferenceRow.from_columns({**columns, "top": _top_of(table, row)})
        for row, columns in enumerate(plain)
    ]


def _top_of(table: pa.Table, row: int) -> TopTokens | None:
    ids, log_probs, log_sum_exp = (table[name][row] for name in TOP_COLUMNS)
    if not ids.is_valid:
        return None
    shape = (len(log_sum_exp), -1)
    return TopTokens(
        ids.values.to_numpy().reshape(shape),
        log_probs.values.to_numpy().reshape(shape),
        log_sum_exp.values.to_numpy(),
    )


def describe_shard(table: pa.Table) -> dict[str, Any]:
    """A shard's entry in the manifest: its row count, a hash of its rows, one of its rewards.

    They are hashes of values: files that pack the same values otherwise have the same.
    """
    digest = hashlib.sha256()
    for name in table.schema.names:
        if name == "reward":
            continue
        values = table[name].combine_chunks()
        if pa.types.is_list(values.type):
            digest.update(pc.list_value_length(values).to_numpy(zero_copy_only=False).tobytes())
            values = values.flatten()
        if pa.types.is_string(values.type):
            digest.update(json.dumps(values.to_pylist()).encode())
        else:
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    rewards = text_hash(str(table["reward"].to_pylist()))
    return {"rows": len(table), "hash": digest.hexdigest()[:16], "rewards": rewards}


def require_unchanged(path: Path, expected: Mapping[str, Any], *, scored: bool) -> None:
    """Refuse a shard that holds something else than the manifest says.

    Args:
        path: the shard.
        expected: what the manifest says of it.
        scored: whether its rewards must be the same, too.

    Raises:
        InputError: it is missing, cannot be read, or has other rows.
    """
    try:
        description = describe_shard(read_table(path))
    except (OSError, pa.ArrowException):
        description = {}
    keys = ("rows", "hash", "rewards") if scored else ("rows", "hash")
    if any(description.get(key) != expected[key] for key in keys):
        raise InputError(
            f"{path} is missing or was changed after the store was written",
            "Make the store again with rlhf reference.",
        )
