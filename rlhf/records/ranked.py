"""The folder that `rlhf export --format ranked` writes and training reads.

DIR/train.jsonl  DIR/test.jsonl   one RankedPrompt per line
DIR/manifest.json                 counts and the content hash of the two files
"""

import json
import re
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import InputError
from rlhf.records.documents import read_document
from rlhf.records.fingerprints import folder_hash
from rlhf.records.jsonl import BadLineError, parse_line, read_lines, write_json, write_jsonl
from rlhf.records.schema import Prompt, RankedPrompt, Split

SPLITS: tuple[Split, ...] = ("train", "test")
MANIFEST = "manifest.json"


def write_ranked(
    folder: Path, records: Sequence[RankedPrompt], extra: dict[str, Any]
) -> dict[str, Any]:
    """Write a ranked dataset into an empty folder and return its manifest."""
    for split in SPLITS:
        chosen = [record for record in records if record.prompt.split == split]
        write_jsonl(folder / f"{split}.jsonl", (record.to_json() for record in chosen))
    manifest = {
        "format": "ranked",
        "prompts": {s: sum(r.prompt.split == s for r in records) for s in SPLITS},
        "responses": sum(len(record.responses) for record in records),
        "rankings": sum(len(record.rankings) for record in records),
        "content_hash": folder_hash(folder, ("*.jsonl",)),
        **extra,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_ranked(folder: Path) -> list[RankedPrompt]:
    """Read a ranked dataset, train prompts first.

    Raises:
        InputError: it is not a ranked export, or its files were changed after the export.
    """
    require_ranked(folder)
    return list(iterate_ranked(folder))


def require_ranked(folder: Path) -> None:
    """Refuse what is not a ranked dataset as it was exported.

    Raises:
        InputError: it is not a ranked export, or its files were changed after the export.
    """
    manifest = read_manifest(folder)
    if manifest.get("format") != "ranked":
        raise InputError(
            f"{folder} holds an export of format {manifest.get('format')!r}, "
            "training needs 'ranked'",
            "Export again: rlhf export --format ranked --db DB --out DIR",
        )
    if manifest["content_hash"] != folder_hash(folder, ("*.jsonl",)):
        raise InputError(
            f"The files of {folder} do not match its {MANIFEST} (content hash differs)",
            "Export again into a new folder: rlhf export --db DB --out DIR",
        )


def iterate_ranked(folder: Path, wanted: Container[int] | None = None) -> Iterator[RankedPrompt]:
    """Read a ranked dataset one prompt at a time, train prompts first.

    `wanted` are the places of the prompts to read, counted from 0; the other lines are not parsed.

    Raises:
        InputError: a file does not exist.
        BadLineError: a line is malformed.
    """
    lines = (line for split in SPLITS for line in read_lines(folder / f"{split}.jsonl"))
    for number, (location, line) in enumerate(lines):
        if wanted is None or number in wanted:
            yield _parse(line, location)


def read_ranked_file(path: Path) -> list[RankedPrompt]:
    """Read one file of ranked prompts.

    Raises:
        InputError: the file does not exist.
        BadLineError: a line is malformed; the message starts with file:line.
    """
    return [_parse(line, location) for location, line in read_lines(path)]


def find_prompts(folder: Path, ids: Collection[str]) -> dict[str, Prompt]:
    """Some prompts of a ranked dataset by id; the lines of others are not parsed.

    Raises:
        InputError: a file does not exist.
        BadLineError: the line of one of them is malformed.
    """
    prompts: dict[str, Prompt] = {}
    quoted = (json.dumps(id_, ensure_ascii=False) for id_ in ids)
    names = re.compile("|".join(map(re.escape, quoted)) or "$^")
    lines = (line for split in reversed(SPLITS) for line in read_lines(folder / f"{split}.jsonl"))
    for location, line in lines:
        if len(prompts) == len(set(ids)):
            break
        if names.search(line):  # it may also be the id of something else
            prompt = _parse(line, location).prompt
            prompts |= {prompt.id: prompt} if prompt.id in ids else {}
    return prompts


def _parse(line: str, location: str) -> RankedPrompt:
    try:
        return RankedPrompt.from_json(parse_line(line, location))
    except BadLineError:
        raise
    except InputError as error:
        raise BadLineError(f"{location}: {error.problem}", error.remedy) from None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an export.

    Raises:
        InputError: the folder does not exist or is not an export, or its manifest is broken.
    """
    path = folder / MANIFEST
    if not folder.exists():
        raise InputError(f"No such folder: {folder}", "Make it: rlhf export --db DB --out DIR")
    if not path.is_file():
        raise InputError(
            f"{folder} is not an exported dataset: it has no {MANIFEST}",
            "Make one: rlhf export --db DB --out DIR",
        )
    return read_document(path, {"format": str, "content_hash": str})
