"""Files into the label database: JSON Lines (also .gz), Parquet, CSV, folders of `datasets`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from labeling_app.checks import Purpose, make_check
from labeling_app.formats import Defaults, Entry, read_entry
from labeling_app.store import Store
from rlhf.errors import InputError
from rlhf.jsonl import BadLineError, parse_line, read_lines
from rlhf.records import Split

OnError = Literal["skip", "stop"]
SHOWN_ERRORS = 5
SPLIT_NAMES: dict[str, Split] = {"train": "train", "test": "test"}
TABLE_SUFFIXES = {".parquet": "parquet", ".csv": "csv"}


@dataclass(kw_only=True)
class Report:
    """What an import did."""

    lines: int = 0
    new_prompts: int = 0
    new_responses: int = 0
    new_rankings: int = 0
    bad_lines: int = 0
    first_bad: list[str] = field(default_factory=list)


def read_files(
    files: Sequence[Path], defaults: Defaults, on_error: OnError
) -> tuple[list[list[Entry]], Report]:
    """Read files without touching a database.

    Args:
        files: JSON Lines, Parquet or CSV files, or folders written by `datasets`.
        defaults: what to assume where a line does not say it; an empty source: the file's name.
        on_error: `stop` at the first bad line, or `skip` and count them.

    Raises:
        BadLineError: a bad line, with `stop`.
        InputError: a file that does not exist or cannot be read, or one without a single good line.
    """
    report = Report()
    contents = []
    for path in files:
        named = defaults if defaults.source else replace(defaults, source=_source_name(path))
        entries = list(_read_entries(path, named, on_error, report))
        if not entries:
            reason = "no good line" if report.bad_lines else "no line"
            raise InputError(
                f"{path} holds {reason}; nothing was imported",
                report.first_bad[0] if report.first_bad else "Check the file.",
            )
        contents.append(entries)
    return contents, report


def store_entries(store: Store, files: Sequence[Sequence[Entry]], report: Report) -> None:
    """Bring entries into the database, one transaction a file; what is there stays as it is."""
    for entries in files:
        with store.connections.write():
            report.new_prompts += store.add_prompts(entry.prompt for entry in entries)
            report.new_responses += store.add_responses(r for e in entries for r in e.responses)
            judged = [r for e in entries if e.check is None for r in e.rankings]
            report.new_rankings += store.add_rankings(judged)
            for entry in entries:
                if entry.check is not None:
                    _store_check(store, entry, entry.check)


def _store_check(store: Store, entry: Entry, purpose: Purpose) -> None:
    [answer] = entry.rankings
    connections = store.connections
    make_check(connections, entry.prompt.id, answer.tiers, purpose, entry.explanation)


def _source_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl") if path.is_file() else path.stem


def _read_entries(
    path: Path, defaults: Defaults, on_error: OnError, report: Report
) -> Iterator[Entry]:
    for place, row, split in _rows(path):
        report.lines += 1
        try:
            value = parse_line(row, place) if isinstance(row, str) else row
            wanted = replace(defaults, split=split) if split else defaults
            yield _entry(place, value, wanted)
        except BadLineError as error:
            if on_error == "stop":
                raise BadLineError(
                    error.problem,
                    f"{error.remedy} Nothing was stored; --on-error skip leaves bad lines out.",
                ) from None
            report.bad_lines += 1
            if len(report.first_bad) < SHOWN_ERRORS:
                report.first_bad.append(error.problem)


def _entry(place: str, value: dict[str, Any], defaults: Defaults) -> Entry:
    try:
        return read_entry(value, defaults)
    except InputError as error:
        raise BadLineError(f"{place}: {error.problem}", error.remedy) from None


def _rows(path: Path) -> Iterator[tuple[str, str | dict[str, Any], Split | None]]:
    """Yield (place, line or object, the split if the container says it)."""
    if path.is_dir():
        yield from _folder_rows(path)
    elif path.suffix in TABLE_SUFFIXES:
        yield from _table_rows(path)
    else:
        for place, line in read_lines(path):
            yield place, line, None


def _table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], Split | None]]:
    if not path.is_file():
        raise InputError(f"No such file: {path}", "Check the path; `ls` its folder.")
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    builder = TABLE_SUFFIXES[path.suffix]
    try:
        rows = load_dataset(builder, data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{path}:{number}", _without_nulls(row), None
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as {builder}: {error}", "Check how the file was written."
        ) from None


def _folder_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], Split | None]]:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise InputError(
            f"{path} is a folder, but not one that datasets' save_to_disk wrote ({error})",
            "Give the files in it, or the folder that save_to_disk made.",
        ) from None
    parts = loaded if isinstance(loaded, DatasetDict) else {"": loaded}
    for split, rows in parts.items():
        for number, row in enumerate(rows, start=1):
            yield f"{path}:{split or 'row'}:{number}", _without_nulls(row), SPLIT_NAMES.get(split)


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
