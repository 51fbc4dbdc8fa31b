"""JSON Lines in, JSON Lines out; every write is atomic (temporary name, fsync, rename).

Input may come from anyone: the length and nesting of a line and the unpacked size of a .gz file are
limited.
"""

import gzip
import io
import json
import os
import re
import shutil
import sys
import time
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn
from uuid import uuid4

from rlhf.errors import InputError

JsonObject = dict[str, Any]
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
PLAIN_TEXT = (".txt", ".txt.gz")  # files of text; others with texts are JSON Lines
SQLITE = b"SQLite format 3\0"
MAX_LINE = 2**24  # characters; a hundred answers of 100 kB fit
MAX_DEPTH = 64  # of objects and lists in each other; Python gives up below 1,000
# Text compresses five- to tenfold, a decompression bomb a thousandfold.
MAX_EXPANSION = 200
FREE_EXPANSION = 2**26  # bytes that a file may unpack to however small it is
ABANDONED_SECONDS = 3600  # since the last write; several jobs may be writing the same file now


class BadLineError(InputError):
    """One line of a file cannot be used; its message starts with file:line."""


def parse_line(text: str, location: str) -> JsonObject:
    """Parse one line as a JSON object.

    Raises:
        BadLineError: the line is not a JSON object, is nested too deep, or has an integer of
            thousands of digits or an unpaired surrogate; the message starts with `location`
            (file:line).
    """
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise BadLineError(
            f"{location}: not valid JSON ({error.msg} at column {error.colno}): "
            f"{text.strip()[:80]!r}",
            "Fix or delete the line; every line must be one JSON object.",
        ) from None
    except ValueError:  # Python refuses longer ones: parsing takes quadratic time
        digits = sys.get_int_max_str_digits()
        raise BadLineError(
            f"{location}: an integer of more than {digits} digits", "Fix or delete the line."
        ) from None
    except RecursionError:
        _refuse_deep(location)
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
        _refuse_deep(location)
    if not isinstance(value, dict):
        raise BadLineError(
            f"{location}: expected a JSON object, found {type(value).__name__}: "
            f"{text.strip()[:80]!r}",
            'Write one object per line, for example {"prompt": "Hello"}.',
        )
    if ESCAPED_SURROGATE.search(text):
        _require_whole_characters(value, location)
    return value


def is_deep(value: Any) -> bool:
    """Whether objects and lists are nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse_deep(location: str) -> NoReturn:
    raise BadLineError(
        f"{location}: nested more than {MAX_DEPTH} deep", "Fix or delete the line."
    ) from None


def _require_whole_characters(value: JsonObject, location: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise BadLineError(
            f"{location}: {half} is half a character (a surrogate without its other half)",
            "Fix or delete the line; text that was cut within a character ends like this.",
        ) from None


Progress = Callable[[float], None]
"""Gets the share of a file that has been read, from 0 to 1."""


def read_lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[str, str]]:
    """Yield (`file:line`, text) for every line that is not blank; a .gz file is unpacked.

    Raises:
        InputError: the file does not exist, is not UTF-8, is a broken .gz file, or has a line that
            is too long.
    """
    for number, line in enumerate(read_text(path, progress=progress), start=1):
        if line.strip():
            yield f"{path}:{number}", line


def text_of(line: str, location: str) -> str:
    """`text` of a line of JSON.

    Raises:
        BadLineError: the line cannot be parsed, or has no text.
    """
    text = parse_line(line, location).get("text")
    if not isinstance(text, str):
        raise BadLineError(
            f"{location}: no text (expected a string under `text`)",
            'Write lines such as {"text": "…"}, or give a .txt file.',
        )
    return text


def read_text(
    path: Path, newline: str | None = None, progress: Progress | None = None
) -> Iterator[str]:
    """Yield every line of a text file; a .gz file is unpacked.

    A `newline` of "" leaves line ends as they are.

    Raises:
        InputError: as `read_lines` has it.
    """
    if not path.is_file():
        raise InputError(
            f"No such file: {path}", "Check the path; `ls` its folder to see what is there."
        )
    if is_database(path):
        raise InputError(f"{path} is a database, not a file of lines", "Give it as --db.")
    is_packed = path.suffix.lower() == ".gz"
    try:
        size = path.stat().st_size
        with (
            path.open("rb") as file,
            gzip.open(file) if is_packed else nullcontext(file) as content,
            io.TextIOWrapper(content, encoding="utf-8-sig", newline=newline) as stream,
        ):
            lines = iter(lambda: stream.readline(MAX_LINE + 1), "")
            for line in _bounded(lines, path, size if is_packed else None):
                if progress is not None:
                    progress(file.tell() / size)
                yield line
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})",
            f"Convert it first: {_conversion(path, is_packed=is_packed)}",
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(
            f"{path} cannot be unpacked ({error})", "Copy or download the file again."
        ) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})", "Check its permissions and its disk."
        ) from None


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database, as label databases are."""
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def _conversion(path: Path, *, is_packed: bool) -> str:
    """The command that writes a file as UTF-8, under a name with the same ending."""
    with gzip.open(path) if is_packed else path.open("rb") as file:
        encoding = "UTF-16" if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "LATIN1"
    if is_packed:
        ending = path.with_suffix("").suffix
        return f"gunzip -c {quote(str(path))} | iconv -f {encoding} -t UTF-8 > converted{ending}"
    return f"iconv -f {encoding} -t UTF-8 {quote(str(path))} > converted{path.suffix}"


def _bounded(lines: Iterator[str], path: Path, packed_bytes: int | None) -> Iterator[str]:
    room = None if packed_bytes is None else expansion_limit(packed_bytes)
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise BadLineError(
                f"{path}:{number}: a line of more than {MAX_LINE:,} characters",
                "Every line must be one JSON object, or one row; check the file's line ends.",
            )
        if room is not None:
            room -= len(line)
            if room < 0:
                refuse_expansion(f"{path}:{number}")
        yield line


def expansion_limit(packed_bytes: int) -> int:
    """How many bytes a packed file of this size may unpack to."""
    return max(FREE_EXPANSION, MAX_EXPANSION * packed_bytes)


def refuse_expansion(location: str) -> NoReturn:
    """Refuse a file that unpacks to far more than text does.

    Raises:
        BadLineError: always.
    """
    raise BadLineError(
        f"{location}: unpacks to more than {MAX_EXPANSION} times its size",
        "It looks like a decompression bomb. If it is yours, unpack it first.",
    )


def read_jsonl(path: Path) -> Iterator[JsonObject]:
    """Yield every object of a JSON Lines file, stopping at the first bad line.

    Raises:
        InputError: the file does not exist or is not UTF-8.
        BadLineError: a line is not a JSON object.
    """
    for location, line in read_lines(path):
        yield parse_line(line, location)


def write_jsonl(path: Path, objects: Iterable[JsonObject]) -> int:
    """Write objects as JSON Lines, atomically. Returns how many."""
    count = 0

    def write(stream: Any) -> None:
        nonlocal count
        for value in objects:
            stream.write(json.dumps(value, ensure_ascii=False) + "\n")
            count += 1

    write_text_atomically(path, write)
    return count


def write_json(path: Path, value: Any) -> None:
    """Write one indented JSON document, atomically."""
    write_text_atomically(
        path, lambda stream: stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    )


def write_text_atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk, rename it to `path`."""
    with new_file(path) as partial, partial.open("w", encoding="utf-8") as stream:
        write(stream)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that, flushed to disk, becomes `path` when the block succeeds.

    Its name is unique: if two programs write the same file at once, the last to finish wins.
    Temporary files that killed programs left are removed after ABANDONED_SECONDS.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    for partial in path.parent.glob(f".{escape(path.name)}.*.partial"):
        with suppress(FileNotFoundError):  # another job has removed or renamed it
            if time.time() - partial.stat().st_mtime > ABANDONED_SECONDS and partial.is_file():
                partial.unlink()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `path` when the block succeeds.

    An existing `path` is replaced then; if the block fails, it is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_folder(partial)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def flush_folder(path: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for entry in (*path.rglob("*"), path):
        flush(entry)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that they survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)
