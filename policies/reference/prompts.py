"""The prompts that the original model answers, and the shards that they are stored in."""

from collections.abc import Sequence
from pathlib import Path

from policies.reference.shards import shard_name
from rlhf.errors import InputError
from rlhf.parallel.distributed import on_main
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import BadLineError, JsonObject, parse_line, read_lines
from rlhf.records.ranked import SPLITS, iterate_ranked, read_manifest, require_ranked
from rlhf.records.schema import Prompt, RankedPrompt


def load_prompts(path: Path) -> tuple[list[RankedPrompt], str]:
    """Prompts of an export with their responses, or of a plain JSON Lines file; and their hash.

    A prompt that a file repeats counts once. All processes call this; the main one hashes.

    Raises:
        InputError: the path does not exist, a line is malformed, two prompts have one id, or there
            is no prompt.
    """
    content_hash = on_main(lambda: _hash_prompts(path))
    records = list(iterate_ranked(path)) if path.is_dir() else _plain_prompts(path)
    if not records:
        raise InputError(f"{path} holds no prompts", "Import some: rlhf import FILE --db DB")
    return records, content_hash


def cut_into_shards(
    records: Sequence[RankedPrompt], size: int
) -> dict[str, Sequence[RankedPrompt]]:
    """The prompts of every Parquet file, by its name; a file has prompts of one split only."""
    shards: dict[str, Sequence[RankedPrompt]] = {}
    for split in SPLITS:
        mine = [record for record in records if record.prompt.split == split]
        for number, first in enumerate(range(0, len(mine), size)):
            shards[shard_name(split, number)] = mine[first : first + size]
    return shards


def _hash_prompts(path: Path) -> str:
    """The hash of an export, whose files are checked against it, or of a file.

    Raises:
        InputError: the path does not exist, or the export was changed.
    """
    if path.is_dir():
        require_ranked(path)
        return str(read_manifest(path)["content_hash"])
    next(read_lines(path), None)  # refuses what is no file of text
    return file_hash(path)


def _plain_prompts(path: Path) -> list[RankedPrompt]:
    records: dict[str, RankedPrompt] = {}
    for location, line in read_lines(path):
        record = _plain_prompt(parse_line(line, location), location)
        before = records.setdefault(record.prompt.id, record).prompt
        if (before.messages, before.split) != (record.prompt.messages, record.prompt.split):
            raise BadLineError(
                f"{location}: the prompt {before.id!r} came before with another text or split",
                "Give every prompt its own id, or none: the id is then made from the text. Put "
                "each prompt into one split only.",
            )
    return list(records.values())


def _plain_prompt(value: JsonObject, location: str) -> RankedPrompt:
    messages = value.get("messages", [{"role": "user", "content": value.get("prompt", "")}])
    try:
        prompt = Prompt.from_json({**value, "messages": messages})
    except InputError as error:
        raise BadLineError(f"{location}: {error.problem}", error.remedy) from None
    return RankedPrompt(prompt=prompt, responses=(), rankings=())
