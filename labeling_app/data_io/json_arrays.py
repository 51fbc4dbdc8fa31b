"""Reads a file that is one JSON array, as other tools export them, an object at a time."""

import json
import re
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from rlhf.errors import InputError
from rlhf.records.jsonl import MAX_LINE, BadLineError, Progress

CHUNK = 2**20
START = 64
SPACE = re.compile(r"[ \t\r\n]*")
EXPORT_AGAIN = "Export it again, or write an object on each line of a .jsonl file."


def is_array(path: Path) -> bool:
    """Whether a file begins as a JSON array, and not with an object, as JSON Lines do."""
    with path.open("rb") as stream:
        start = stream.read(START).removeprefix(b"\xef\xbb\xbf").lstrip()
    return start.startswith(b"[")


def read_array(path: Path, progress: Progress | None = None) -> Iterator[tuple[str, str]]:
    """Yield (`file: item number`, text) for every item, holding little more than one in memory.

    Raises:
        BadLineError: an item is no object or too large, or the array does not end.
        InputError: the file is not UTF-8.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file, TextIOWrapper(file, encoding="utf-8-sig") as stream:
            for item in _items(stream, path):
                if progress is not None:
                    progress(file.tell() / size)
                yield item
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason})", "Save it as UTF-8.") from None


def _items(stream: TextIO, path: Path) -> Iterator[tuple[str, str]]:
    decoder = json.JSONDecoder()
    text, at, number = stream.read(max(CHUNK, START)).lstrip()[1:], 0, 1
    is_next = True  # an item may begin here; False: a comma comes first
    while True:
        location = f"{path}: item {number}"
        at = _after_space(text, at)
        if text.startswith("]", at):
            if is_next and number > 1:
                raise BadLineError(f"{path}: a comma before the end of the array", EXPORT_AGAIN)
            _require_end(path, text[at + 1 :], stream)
            return
        if at < len(text) and not is_next:
            if text[at] != ",":
                raise BadLineError(f"{location}: a comma is missing before it", EXPORT_AGAIN)
            at, is_next = at + 1, True
            continue
        end = _end_of_item(decoder, text, at, location) if at < len(text) else None
        if end is None:
            more = stream.read(CHUNK)
            if not more:
                raise BadLineError(f"{location} is cut off or not valid JSON", EXPORT_AGAIN)
            text, at = text[at:] + more, 0
            continue
        yield location, text[at:end]
        at, number, is_next = end, number + 1, False


def _after_space(text: str, at: int) -> int:
    space = SPACE.match(text, at)
    return space.end() if space else at


def _end_of_item(decoder: json.JSONDecoder, text: str, at: int, location: str) -> int | None:
    """The end of the item that begins at `at`; None if more of the file is needed to tell."""
    if at < len(text) and text[at] != "{":
        raise BadLineError(f"{location} is not an object: {text[at : at + 40]!r}", EXPORT_AGAIN)
    try:
        return decoder.raw_decode(text, at)[1]
    except RecursionError:
        raise BadLineError(f"{location} is nested too deeply", EXPORT_AGAIN) from None
    except json.JSONDecodeError:
        if len(text) - at > MAX_LINE:
            raise BadLineError(
                f"{location}: more than {MAX_LINE:,} characters, or not valid JSON",
                "Remove the item, or the fields that it does not need.",
            ) from None
        return None
    except ValueError:  # Python refuses integers of thousands of digits, also of one that goes on
        digits = sys.get_int_max_str_digits()
        raise BadLineError(
            f"{location}: an integer of more than {digits} digits", EXPORT_AGAIN
        ) from None


def _require_end(path: Path, rest: str, stream: TextIO) -> None:
    """Refuse anything but white space in `rest` and what the stream still holds."""
    text = rest.strip()
    while not text and (more := stream.read(CHUNK)):
        text = more.strip()
    if text:
        raise BadLineError(f"{path}: text after the end of the array: {text[:40]!r}", EXPORT_AGAIN)
