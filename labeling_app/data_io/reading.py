"""Reads rows one at a time from JSON Lines, JSON arrays, CSV, Parquet and `datasets`.

Values are read as they stand: every cell of a CSV file is text, NA and None included, and a null of
a table stays a null. Memory stays bounded, because a small file can unpack to a huge one: the
characters of a row are limited, and so is the size to which a compressed file may unpack.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from labeling_app.data_io.json_arrays import is_array, read_array
from rlhf.errors import ConfigError, InputError
from rlhf.records.jsonl import (
    MAX_LINE,
    BadLineError,
    JsonObject,
    Progress,
    expansion_limit,
    read_lines,
    read_text,
    refuse_expansion,
)
from rlhf.records.schema import Split
from rlhf.records.wording import counted

# A location; its line or object, or why there is none; and the split if the container says it.
Row = tuple[str, str | JsonObject | BadLineError, Split | None]
SPLIT_NAMES: dict[str, Split] = {"train": "train", "test": "test"}
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
TABLES = (".csv", ".tsv")
FILES = (".jsonl", ".ndjson", ".json", ".gz", ".parquet", *TABLES, *SPREADSHEETS)
AS_CSV = "Save the sheet as CSV (Excel: File, Save As, CSV UTF-8), and import that file."
PACKED = b"PK\x03\x04"  # a zip file, which .xlsx is
SAID_SEPARATOR = re.compile(r"(?i)sep=.\s*")
SEPARATORS = (",", ";", "\t")  # of cells; the first wins where the head decides nothing
SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # by `save_to_disk`
BUILDERS = ("csv", "json", "parquet", "arrow", "cache")
DATASET = "a dataset"
BATCH_ROWS = 64
UNREACHED = (
    "There is no such file either. Check the name and the network; without a network, only "
    "datasets that `datasets` has kept can be read."
)
CELL_CHARACTERS = 8  # what a number, or nothing, counts


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a dataset to read, and how."""

    data_split: str = ""
    split: Split | None = None
    """What a single part is for; by default its name says it."""
    config_name: str = ""
    streaming: bool = False


def is_hub_name(path: Path) -> bool:
    """Whether this is OWNER/NAME of a dataset of the hub rather than a path."""
    owner = path.parent
    return (
        len(path.parts) == 2
        and not path.exists()
        and not owner.exists()
        and path.suffix.lower() not in FILES
        and not str(owner).startswith((".", "/", "~"))
    )


def require_there(path: Path, part: Part) -> None:
    """Check that there is a file, a folder or a hub name to read, and that `part` fits it.

    Raises:
        InputError: there is none, or a part is asked of a single file.
    """
    if is_hub_name(path) or path.is_dir():
        return
    if not path.is_file():
        raise InputError(
            f"No such file: {path}",
            "Check the path; `ls` its folder. A dataset of the hub is named OWNER/NAME.",
        )
    for flag in ("data_split", "config_name"):
        if getattr(part, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} has no effect on {path}, a single file",
                "Give the dataset's folder or its name on the hub, or leave the flag out.",
            )


def read_rows(path: Path, part: Part, progress: Progress | None = None) -> Iterator[Row]:
    """Yield every row of a file, of a folder, or of a dataset of the hub.

    Args:
        path: what to read.
        part: of a dataset.
        progress: gets the share of a single file that is read: of its bytes, or of a table's rows.

    Raises:
        InputError: it cannot be read, or has no such part.
        BadLineError: a row is too large, or what follows it cannot be read.
    """
    if is_hub_name(path) or path.is_dir():
        yield from _dataset_rows(path, part)
        return
    refuse_spreadsheet(path.name)
    if path.suffix.lower() == ".parquet":
        yield from _parquet_rows(path, progress)
    elif path.suffix.lower() in TABLES:
        yield from _csv_rows(path, progress)
    elif path.suffix.lower() == ".json" and is_array(path):
        for location, text in read_array(path, progress):
            yield location, text, None
    else:
        for location, line in read_lines(path, progress):
            yield location, line, None


def refuse_spreadsheet(name: str) -> None:
    """Refuse a file of a spreadsheet program, by its name.

    Raises:
        InputError: it is one.
    """
    if name.lower().endswith(SPREADSHEETS):
        remedy = f"{AS_CSV} If it is one already, call it .csv."
        raise InputError(f"{name} is a spreadsheet, which cannot be read", remedy)


def _refuse_packed(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(PACKED)) == PACKED:
            raise InputError(f"{path} holds a spreadsheet or another packed file", AS_CSV)


def _separator(path: Path, head: str) -> str:
    """The separator of a table's cells: the one its head has most of, outside of quotes."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    bare = re.sub(r'"[^"]*"', "", head)
    return max(SEPARATORS, key=bare.count)


def _csv_rows(path: Path, progress: Progress | None) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE)
    _refuse_packed(path)
    lines = read_text(path, newline="", progress=progress)
    skipped = 0
    # blank lines; and `sep=;`, which Excel puts before the head
    while (head := next(lines, "")) and (not head.strip() or SAID_SEPARATOR.fullmatch(head)):
        skipped += 1
    reader = csv.reader(chain([head], lines), delimiter=_separator(path, head), strict=True)
    header: list[str] = []
    first = skipped + 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise BadLineError(
                f"{path}:{first}: not valid CSV ({error})",
                "Quote texts that hold separators, quotes or line ends, and double the quotes in "
                "them.",
            ) from None
        if cells is None:
            return
        if not header:
            header = [name.strip() for name in cells]
            _require_different(header, path)
        elif len(cells) == len(header):
            yield f"{path}:{first}", dict(zip(header, cells, strict=True)), None
        elif cells:  # a blank line has none
            yield f"{path}:{first}", _wrong_width(f"{path}:{first}", cells, header), None
        first = skipped + reader.line_num + 1


def _require_different(header: list[str], path: Path) -> None:
    double = next((name for name in header if header.count(name) > 1), None)
    if double is not None:
        raise InputError(f"{path} has two columns {double!r}", "Rename or remove one of them.")


def _wrong_width(location: str, cells: list[str], header: list[str]) -> BadLineError:
    return BadLineError(
        f"{location}: {counted(len(cells), 'cell')} under {counted(len(header), 'column')}",
        f"Give one cell for each of {', '.join(header)}; quote texts that hold separators.",
    )


def _parquet_rows(path: Path, progress: Progress | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def rows() -> Iterator[JsonObject]:
        schema = pq.read_schema(path)
        # Repeated texts stay references to one: a few bytes can stand for gigabytes.
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
            if sum(group.total_byte_size for group in groups) > limit:
                refuse_expansion(str(path))
            num_read = 0
            for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                batch.validate(full=True)
                num_read += batch.num_rows
                if progress is not None:
                    progress(num_read / file.metadata.num_rows)
                for number in range(batch.num_rows):
                    yield {name: batch[name][number].as_py() for name in batch.schema.names}

    limit = expansion_limit(path.stat().st_size)
    yield from _numbered(rows(), path, "parquet", limit=limit)


def _numbered(
    rows: Iterable[JsonObject], path: Path, kind: str, *, split: str = "", limit: int | None = None
) -> Iterator[Row]:
    """Rows with their locations, counted from 1, and no more than `limit` characters of them."""
    number, remaining = 1, limit
    prefix = str(path) if kind == "parquet" else f"{path}:{split or 'row'}"
    following = iter(rows)
    while True:
        with _readable(path, f"{prefix}:{number}", kind):
            row = next(following, None)
        if row is None:
            return
        size = _num_characters(row)
        if size > MAX_LINE:
            raise BadLineError(
                f"{prefix}:{number}: a row of more than {MAX_LINE:,} characters",
                "Remove the row, or the columns that it does not need.",
            )
        if remaining is not None:
            remaining -= size
            if remaining < 0:
                refuse_expansion(f"{prefix}:{number}")
        yield f"{prefix}:{number}", row, SPLIT_NAMES.get(split)
        number += 1


def _num_characters(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return CELL_CHARACTERS + sum(map(_num_characters, value.values()))
    if isinstance(value, list):
        return CELL_CHARACTERS + sum(map(_num_characters, value))
    return CELL_CHARACTERS


@contextmanager
def _readable(path: Path, location: str, kind: str) -> Iterator[None]:
    """Turn the errors of libraries that read a file into one that names the file and location.

    They check little of what they read, so a broken file can raise errors of many types.
    """
    import pyarrow as pa
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # of its own choice

    of_python = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
    of_any_kind = (EOFError, RuntimeError, AssertionError, ImportError)
    of_libraries = (pa.ArrowException, DatasetsError, httpx.HTTPError)
    try:
        yield
    except InputError:
        raise
    except (*of_python, *of_any_kind, *of_libraries) as error:
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = UNREACHED if is_hub_name(path) else f"See how {path} was written or copied."
        raise BadLineError(
            f"{location}: cannot be read as {kind} ({message:.300})", remedy
        ) from None


# ------------------------------------------------------------------------------------- `datasets`


def _dataset_rows(path: Path, part: Part) -> Iterator[Row]:
    is_saved = any((path / name).exists() for name in SAVED)
    with _readable(path, str(path), DATASET):
        parts = _saved_parts(path) if is_saved else _built_parts(path, part)
    chosen = _chosen(parts, path, part)
    for split, rows in chosen.items():
        for location, row, own_split in _numbered(rows, path, DATASET, split=split):
            yield location, row, (part.split if len(chosen) == 1 else None) or own_split


def _saved_parts(folder: Path) -> dict[str, Any]:
    """The rows that `save_to_disk` wrote, by split; "" where it is one part alone."""
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(folder))
    parts = loaded if isinstance(loaded, DatasetDict) else {"": loaded}
    for rows in parts.values():
        rows.data.validate(full=True)  # broken offsets would lead outside of the data
    return dict(parts)


def _built_parts(path: Path, part: Part) -> dict[str, Any]:
    """The splits of a folder of files, or of a dataset of the hub."""
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(str(path), part.config_name or None)
    except FileNotFoundError as error:
        if not path.is_dir():
            raise
        raise InputError(
            f"{path} is a folder, but not one that datasets' save_to_disk wrote, nor one of data "
            f"files ({error})",
            "Give the files in it, or the folder that save_to_disk made.",
        ) from None
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in BUILDERS:
        raise InputError(
            f"{path} holds files of kind {kind}",
            "rlhf import reads JSON Lines, CSV, Parquet and Arrow.",
        )
    if kind == "csv":
        builder = _csv_as_text(path, part)
    if path.is_dir() or part.streaming:
        return dict(builder.as_streaming_dataset())
    builder.download_and_prepare()
    return dict(builder.as_dataset())


def _csv_as_text(path: Path, part: Part) -> Any:
    """A builder for CSV files in which every cell is text: NA, None and 007, too."""
    import pandas as pd  # type: ignore[import-untyped]
    from datasets import load_dataset_builder

    options: dict[str, Any] = {"path": str(path), "name": part.config_name or None}
    config = load_dataset_builder(**options).config
    files = [file for of_split in config.data_files.values() for file in of_split]
    heads = [pd.read_csv(file, nrows=0, sep=config.sep).columns for file in files]
    as_text = {name: str for head in heads for name in head}
    return load_dataset_builder(**options, na_filter=False, converters=as_text)


def _chosen(parts: dict[str, Any], path: Path, part: Part) -> dict[str, Any]:
    """The part that was asked for; by default all, if they are called train and test."""
    if part.data_split:
        if part.data_split not in parts:
            names = ", ".join(name for name in parts if name)
            raise InputError(
                f"{path} has no split {part.data_split!r}",
                f"Its splits are: {names}." if names else "It has none; leave --data-split out.",
            )
        return {part.data_split: parts[part.data_split]}
    unknown = next((name for name in parts if name and name not in SPLIT_NAMES), None)
    if unknown is not None:
        raise InputError(
            f"{path} has a split {unknown!r}, which is neither train nor test",
            f"Say what it is for: --data-split {unknown} with --split train or --split test.",
        )
    return parts
