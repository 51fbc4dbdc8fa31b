"""The content of a reference store: the counts of its manifest, and `rlhf reference --inspect`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from policies.reference.shards import ReferenceRow, describe_shard, read_table
from policies.reference.store import FORMAT_VERSION, MANIFEST, open_store
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import require_done


def write_manifest(
    folder: Path, names: Iterable[str], facts: dict[str, Any], samples_per_prompt: int
) -> dict[str, Any]:
    """Count and hash the shards and write the manifest that makes the store complete.

    Args:
        folder: where the shards are.
        names: of the shards, in the order of the store.
        facts: what the manifest says of model, reward and sampling.
        samples_per_prompt: rows of each prompt.
    """
    shards, tallies = {}, []
    for name in names:
        table = read_table(folder / name)
        shards[name] = describe_shard(table)
        tallies.append(_tally(table))
    sums = {key: sum(tally[key] for tally in tallies) for key in tallies[0]}
    manifest = {
        "format_version": FORMAT_VERSION,
        **facts,
        "samples_per_prompt": samples_per_prompt,
        "prompts": sums["rows"] // samples_per_prompt,
        "rows": sums["rows"],
        "reused": sums["reused"],
        "finished": sums["finished"],
        "longest_prompt": max(tally["longest_prompt"] for tally in tallies),
        "mean_length": sums["tokens"] / sums["rows"],
        "mean_log_prob": sums["log_probs"] / sums["tokens"],
        "shards": shards,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _tally(table: pa.Table) -> dict[str, Any]:
    return {
        "rows": len(table),
        "reused": pc.sum(table["reused"]).as_py(),
        "finished": pc.sum(table["finished"]).as_py(),
        "tokens": int(_lengths(table, "response_ids").sum()),
        "log_probs": float(_flat(table, "log_probs").sum(dtype=np.float64)),
        "longest_prompt": int(_lengths(table, "prompt_ids").max()),
    }


def inspect_store(out: Path) -> dict[str, Any]:
    """Read a whole store, check it against its hashes, and say what is in it.

    Raises:
        InputError: there is no finished store, or a shard was changed.
    """
    store = open_store(require_done(out, "reference", "outputs").outputs)
    manifest, rows = store.manifest, store.rows
    prompt_lengths, lengths, rewards = [], [], []
    entropy = 0.0
    for table in rows.tables():
        prompt_lengths.append(_lengths(table, "prompt_ids"))
        lengths.append(_lengths(table, "response_ids"))
        rewards.append(table["reward"].to_numpy())
        entropy += float(_flat(table, "entropy").sum(dtype=np.float64))
    indices = sorted({0, len(rows) // 2, len(rows) - 1})
    return {
        "path": str(out),
        "model": manifest["model"]["path"],
        "sampling": manifest["sampling"],
        "precision": manifest["precision"],
        "stored_top_k": manifest["stored_top_k"],
        "prompts": {split: len(store.by_prompt(split)) for split in ("train", "test")},
        "samples_per_prompt": manifest["samples_per_prompt"],
        "rows": len(rows),
        "reused": manifest["reused"],
        "shards": len(manifest["shards"]),
        "prompt_length": _spread(np.concatenate(prompt_lengths)),
        "length": _spread(np.concatenate(lengths)),
        "eos_rate": manifest["finished"] / len(rows),
        "mean_log_prob": manifest["mean_log_prob"],
        "mean_entropy": entropy / int(sum(part.sum() for part in lengths)),
        "reward": manifest["reward"]
        and {"path": manifest["reward"]["path"], **_spread(np.concatenate(rewards))},
        "examples": [_example(rows[index]) for index in indices],
    }


def _spread(values: Float[ndarray, " N"] | Int[ndarray, " N"]) -> dict[str, float]:
    return {
        "mean": float(values.mean(dtype=np.float64)),
        "std": float(values.std(dtype=np.float64)),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "p95": float(np.quantile(values, 0.95)),
        "max": float(values.max()),
    }


def _example(row: ReferenceRow) -> dict[str, Any]:
    return {
        "split": row.prompt.split,
        "prompt": row.prompt.text,
        "response": row.text,
        "length": len(row.response_ids),
        "finished": row.finished,
        "mean_log_prob": sum(row.log_probs) / len(row.log_probs),
        "reward": row.reward,
    }


def _lengths(table: pa.Table, column: str) -> Int[ndarray, " N"]:
    lengths: ndarray = pc.list_value_length(table[column]).to_numpy()
    return lengths


def _flat(table: pa.Table, column: str) -> Float[ndarray, " T"]:
    values: ndarray = pc.list_flatten(table[column]).to_numpy()
    return values
