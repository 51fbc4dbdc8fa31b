"""Reads demonstrations for supervised fine-tuning: prompts with one completion each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.errors import InputError
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import BadLineError, JsonObject, parse_line, read_lines
from rlhf.records.ranked import SPLITS, read_manifest
from rlhf.records.schema import Message, Prompt

FORMAT = "demonstrations"
Rows = dict[str, list[JsonObject]]


def read_demonstrations(path: Path) -> tuple[Rows, str]:
    """Train and test rows with `prompt` and `completion` as messages, and a hash of the source.

    Args:
        path: a folder of `rlhf export --format demonstrations`, or a JSON Lines file of lines with
            prompt and completion (texts or messages), or with messages that end with a response,
            and perhaps with a `split`; by default `train`.

    Raises:
        InputError: no such file, another kind of export, a line that cannot be used, or none.
    """
    if path.is_dir():
        manifest = read_manifest(path)
        if manifest["format"] != FORMAT:
            raise InputError(
                f"{path} holds an export of format {manifest['format']!r}, not {FORMAT!r}",
                f"Export again: rlhf export --format {FORMAT} --db DB --out DIR",
            )
        rows: Rows = {
            split: [row for _, row in _read_file(path / f"{split}.jsonl")] for split in SPLITS
        }
        return _require_some(rows, path), str(manifest["content_hash"])
    rows = {split: [] for split in SPLITS}
    for split, row in _read_file(path):
        rows[split].append(row)
    return _require_some(rows, path), file_hash(path)


def _require_some(rows: Rows, path: Path) -> Rows:
    if not rows["train"]:
        raise InputError(
            f"{path} holds no demonstrations to train on",
            "Edit responses in rlhf label --db DB --model MODEL, then export again.",
        )
    return rows


def _read_file(path: Path) -> Iterator[tuple[str, JsonObject]]:
    """The split and the row of each line."""
    for location, line in read_lines(path):
        value = parse_line(line, location)
        try:
            yield _split_and_row(value)
        except InputError as error:
            raise BadLineError(f"{location}: {error.problem}", error.remedy) from None


def _split_and_row(value: JsonObject) -> tuple[str, JsonObject]:
    if "messages" in value:
        turns = _messages(value["messages"], "user")
        prompt, completion = turns[:-1], turns[-1:]
    else:
        prompt = _messages(value.get("prompt"), "user")
        completion = _messages(value.get("completion"), "assistant")
    is_response = len(completion) == 1 and completion[0].role == "assistant"
    if not is_response or not completion[0].content.strip():
        raise InputError(
            "A demonstration must end with one response of the assistant",
            'Write {"prompt": "Hi?", "completion": "Hello!"}, or messages that end with it.',
        )
    shown = Prompt.create(prompt, value.get("split") or "train", "")
    response = {"role": "assistant", "content": completion[0].content}
    return shown.split, {"prompt": shown.chat, "completion": [response]}


def _messages(value: Any, role: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role=role, content=value),)
    if isinstance(value, list):
        return tuple(Message.from_json(message) for message in value)
    raise InputError(
        f"A demonstration needs prompt and completion, or messages; found {value!r}",
        'Write {"prompt": "Hi?", "completion": "Hello!"}.',
    )
