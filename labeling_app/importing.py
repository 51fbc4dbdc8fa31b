"""Files into the label database: JSON Lines (also .gz), Parquet, CSV, folders of `datasets`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    new_checks: int = 0
    checks_not_made: int = 0
    first_not_made: list[str] = field(default_factory=list)
    bad_lines: int = 0
    first_bad: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class File:
    """The good lines of one file, each with its place, and what a bad one does."""

    path: Path
    entries: list[tuple[str, Entry]]
    on_error: OnError


def read_files(
    files: Sequence[Path], defaults: Defaults, on_error: OnError
) -> tuple[list[File], Report]:
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
        _require_good_lines(path, len(entries), report)
        contents.append(File(path=path, entries=entries, on_error=on_error))
    return contents, report


def store_entries(store: Store, files: Sequence[File], report: Report) -> None:
    """Bring entries into the database, one transaction a file; what is there stays as it is.

    Raises:
        BadLineError: a line that does not fit the database or the lines before it, with `stop`.
        InputError: a file without a single line that fits.
    """
    for file in files:
        with store.connections.write() as db:
            bad_before = report.bad_lines
            for place, entry in file.entries:
                with _named(place, file.on_error, report), db.atomic():
                    _store_entry(store, place, entry, report)
            num_good = len(file.entries) - (report.bad_lines - bad_before)
            _require_good_lines(file.path, num_good, report)


def _store_entry(store: Store, place: str, entry: Entry, report: Report) -> None:
    new_prompts = store.add_prompts([entry.prompt])
    new_responses = store.add_responses(entry.responses, queue=entry.check is None)
    if entry.check is None:
        report.new_rankings += store.add_rankings(entry.rankings)
    else:
        _store_check(store, place, entry, entry.check, report)
    # Only now: a ranking that does not fit takes its prompt and responses back with it.
    report.new_prompts += new_prompts
    report.new_responses += new_responses


def _store_check(store: Store, place: str, entry: Entry, purpose: Purpose, report: Report) -> None:
    [answer] = entry.rankings
    shown = [response.id for response in entry.responses]
    try:
        report.new_checks += make_check(
            store.connections, answer, shown, purpose, entry.explanation
        )
    except InputError as error:
        report.checks_not_made += 1
        if len(report.first_not_made) < SHOWN_ERRORS:
            report.first_not_made.append(f"{place}: {error.problem}")


@contextmanager
def _named(place: str, on_error: OnError, report: Report) -> Iterator[None]:
    """Around the work on one line: when it cannot be used, stop and name it, or count it."""
    try:
        yield
    except InputError as error:
        problem = error.problem if isinstance(error, BadLineError) else f"{place}: {error.problem}"
        if on_error == "stop":
            raise BadLineError(
                problem,
                f"{error.remedy} Nothing of the file was stored; --on-error skip leaves bad lines "
                "out.",
            ) from None
        report.bad_lines += 1
        if len(report.first_bad) < SHOWN_ERRORS:
            report.first_bad.append(problem)


def _require_good_lines(path: Path, num_good: int, report: Report) -> None:
    if not num_good:
        reason = "no good line" if report.bad_lines else "no line"
        raise InputError(
            f"{path} holds {reason}; nothing of it was imported",
            report.first_bad[0] if report.first_bad else "Check the file.",
        )


def _source_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl") if path.is_file() else path.stem


def _read_entries(
    path: Path, defaults: Defaults, on_error: OnError, report: Report
) -> Iterator[tuple[str, Entry]]:
    for place, row, split in _rows(path):
        report.lines += 1
        with _named(place, on_error, report):
            value = parse_line(row, place) if isinstance(row, str) else row
            yield place, read_entry(value, replace(defaults, split=split) if split else defaults)


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
        if split and split not in SPLIT_NAMES:
            raise InputError(
                f"{path} has a split {split!r}; only train and test say what they are for",
                f"Save that part alone, load_from_disk(…)[{split!r}].save_to_disk(FOLDER), and "
                "import FOLDER with --split train or --split test.",
            )
        for number, row in enumerate(rows, start=1):
            yield f"{path}:{split or 'row'}:{number}", _without_nulls(row), SPLIT_NAMES.get(split)


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
