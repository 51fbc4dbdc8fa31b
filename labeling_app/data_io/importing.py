"""Imports files into the label database, each completely or not at all."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from sqlite_utils import Database

from labeling_app.data_io.fields import MAX_NAMES
from labeling_app.data_io.formats import Defaults, Entry, read_entry
from labeling_app.data_io.lines.other_tools import require_one_question
from labeling_app.data_io.lines.stated import COLUMNS_EXAMPLE, EXAMPLES
from labeling_app.data_io.reading import TABLES, Part, is_hub_name, read_rows
from labeling_app.data_io.repeats import Repeats
from labeling_app.db.imports.replacing import last_name, names_of_imports, replaced_among
from labeling_app.db.imports.unfinished import (
    READ_AHEAD,
    Check,
    Import,
    defer_check,
    importing,
    write_in_chunks,
)
from labeling_app.db.store import Store
from rlhf.errors import InputError, MisreadError, UnusableContentError
from rlhf.records.jsonl import BadLineError, Progress, parse_line
from rlhf.records.wording import counted

OnError = Literal["few", "skip", "stop"]
SHOWN_ERRORS = 100
SKIP_BAD_LINES = "add --on-error skip"
NOTHING_STORED = "Nothing of the file was stored."
FEW = 100  # fewer than one bad line in this many are few
ENDING = re.compile(r"(?<=.)(\.(jsonl|ndjson|json|csv|tsv|parquet))?(\.gz)?$", re.IGNORECASE)
Placed = tuple[str, Entry]


@dataclass(kw_only=True)
class Report:
    """The outcome of an import: its counts and first errors."""

    lines: int = 0
    new_prompts: int = 0
    new_responses: int = 0
    new_rankings: int = 0
    unnamed_before: int = 0
    """Rankings of people without a name that are there already, maybe another person's."""
    new_checks: int = 0
    checks_not_made: int = 0
    first_not_made: list[str] = field(default_factory=list)
    returned: int = 0
    """Rankings that a later file of their source had replaced, and that count again."""
    replaced: int = 0
    unchanged: int = 0
    other_sources: list[str] = field(default_factory=list)
    bad_lines: int = 0
    first_bad: list[str] = field(default_factory=list)
    ignored_fields: dict[str, int] = field(default_factory=dict)
    """Lines with a field that was not read, by the field's name."""
    read_fields: dict[str, int] = field(default_factory=dict)
    """Records of another tool with a field that was read, by the field's name."""
    questions: dict[str, int] = field(default_factory=dict)
    """Records with judgments, by the question that people answered; all of a file have one."""
    judgments_by: dict[str, int] = field(default_factory=dict)
    """Judgments in records of another tool, by their annotator."""
    unfinished: int = 0
    """Answers in these records that were left out: drafts, discarded and skipped ones."""

    def add(self, report: "Report") -> None:
        """Count another file's lines as well."""
        for name, value in vars(report).items():
            if isinstance(value, dict):
                self.count(name, value)
                continue
            total = getattr(self, name) + value
            setattr(self, name, total[:SHOWN_ERRORS] if isinstance(total, list) else total)

    def count(self, field_name: str, counts: Mapping[str, int]) -> None:
        """Add to the numbers by name, such as `ignored_fields`."""
        known = getattr(self, field_name)
        for name, number in counts.items():
            if name in known or len(known) < MAX_NAMES:
                known[name] = known.get(name, 0) + number

    def count_entry(self, entry: Entry) -> None:
        """Count what was read of a line, and what was not."""
        self.count("ignored_fields", dict.fromkeys(entry.ignored, 1))
        if entry.exported is not None:
            self.count("read_fields", dict.fromkeys(entry.exported.read, 1))
            if entry.exported.judgments:
                self.count("questions", {entry.exported.question: 1})
            self.count("judgments_by", Counter(ranking.annotator for ranking in entry.rankings))
            self.unfinished += entry.exported.num_unfinished


def import_file(
    path: Path,
    db: Path,
    defaults: Defaults,
    on_error: OnError,
    part: Part,
    *,
    replace_earlier: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Import a file into a database; rows that exist already stay as they are.

    If its first lines cannot be read, no new database is created.

    Args:
        path: a JSON Lines, Parquet or CSV file, a folder, or a name of the hub.
        db: the label database; created when it does not exist.
        defaults: what to assume where a line does not say it; an empty source: `source_for`.
        on_error: `stop` at the first bad line, `skip` and count them, or leave out only a `few`
            that hold nothing to judge.
        part: which part of a dataset to read.
        replace_earlier: retire the rankings that earlier imports of the same source gave and this
            file lacks.
        progress: gets the share of a file that is read, again and again.

    Raises:
        BadLineError: a bad line, unless it is left out.
        InputError: a file that cannot be read, or one without a single good line.
        InterruptedRunError: another import is running, or the disk is full.
    """
    report = Report()
    name = defaults.source or _source_of(path, db)
    entries = read_entries(path, replace(defaults, source=name), on_error, report, part, progress)
    first = list(islice(entries, READ_AHEAD))
    if len(first) < READ_AHEAD:
        _require_good_lines(path, len(first), on_error, report)
    with Store(db) as store:
        connections = store.connections
        known = names_of_imports(connections.db)
        with importing(connections, str(path), name=name, replace=replace_earlier) as current:
            num_stored = _store(store, current, chain(first, entries), on_error, report)
            _require_good_lines(path, num_stored, on_error, report)
        report.returned = current.num_returned
        report.new_checks = current.checks.made
        report.checks_not_made = len(current.checks.refused)
        report.first_not_made = current.checks.refused[:SHOWN_ERRORS]
        if current.replaced:
            report.replaced, report.unchanged = current.replaced.retired, current.replaced.kept
            report.other_sources = [] if name in known else [source for source in known if source]
    return report


def _store(
    store: Store, current: Import, entries: Iterator[Placed], on_error: OnError, report: Report
) -> int:
    """Store entries, hidden until the import is finished. Returns how many were stored."""
    num_stored = 0

    def store_one(db: Database, placed: Placed) -> None:
        nonlocal num_stored
        location, entry = placed
        with _named(location, on_error, report), db.atomic():
            _store_entry(store, db, current.id, location, entry, report)
            ids = [ranking.id for ranking in entry.rankings]
            current.returned |= replaced_among(db, ids)
            if current.given is not None:
                current.given.update(ids)
            num_stored += 1

    write_in_chunks(store.connections, entries, store_one, import_id=current.id)
    return num_stored


def _store_entry(
    store: Store, db: Database, import_id: int, location: str, entry: Entry, report: Report
) -> None:
    new_prompts = store.add_prompts([entry.prompt], import_id=import_id)
    is_check = entry.check is not None
    new_responses = store.add_responses(entry.responses, queue=not is_check, import_id=import_id)
    if entry.check is None:
        new = store.add_rankings(entry.rankings, import_id=import_id, times_by_id=entry.made)
        report.new_rankings += new
        if entry.is_unnamed:
            report.unnamed_before += len(entry.rankings) - new
    else:
        check = Check(
            location=location,
            answer=entry.rankings[0],
            responses=[response.id for response in entry.responses],
            purpose=entry.check,
            explanation=entry.explanation,
        )
        defer_check(db, import_id, check)
    # Only now: a ranking that does not fit takes its prompt and responses back with it.
    report.new_prompts += new_prompts
    report.new_responses += new_responses


@contextmanager
def _named(location: str, on_error: OnError, report: Report) -> Iterator[None]:
    """Handle one line's error: stop and name the line, or leave it out and count it."""
    try:
        yield
    except InputError as error:
        problem = (
            error.problem if isinstance(error, BadLineError) else f"{location}: {error.problem}"
        )
        if isinstance(error, MisreadError):
            raise BadLineError(problem, f"{error.remedy} {NOTHING_STORED}") from None
        is_left_out = on_error == "skip" or (
            on_error == "few" and isinstance(error, UnusableContentError)
        )
        if not is_left_out:
            raise BadLineError(
                problem,
                f"{error.remedy} {NOTHING_STORED} To leave out bad lines, {SKIP_BAD_LINES}.",
            ) from None
        report.bad_lines += 1
        if len(report.first_bad) < SHOWN_ERRORS:
            is_said = any(message.endswith(error.remedy) for message in report.first_bad)
            report.first_bad.append(problem if is_said else f"{problem}. {error.remedy}")


@contextmanager
def _in_columns(path: Path) -> Iterator[None]:
    """Let an error of a table show columns for an example, in place of JSON."""
    try:
        yield
    except InputError as error:
        if path.suffix.lower() not in TABLES or error.remedy != EXAMPLES:
            raise
        raise type(error)(error.problem, COLUMNS_EXAMPLE) from None


def _require_good_lines(path: Path, num_good: int, on_error: OnError, report: Report) -> None:
    if on_error == "few" and report.bad_lines * FEW >= max(report.lines, 1):
        raise InputError(
            f"{path}: nothing to judge in {report.bad_lines:,} of {counted(report.lines, 'line')}, "
            f"the first: {report.first_bad[0]}",
            f"They are left out only if they are fewer than 1 in {FEW}. {NOTHING_STORED} To leave "
            f"out all bad lines, {SKIP_BAD_LINES}.",
        )
    if not num_good:
        reason = "no good line" if report.bad_lines else "no line"
        raise InputError(
            f"{path} holds {reason}; nothing of it was imported",
            report.first_bad[0] if report.first_bad else "Check the file.",
        )


def source_for(file_name: str, db: Database | None = None) -> str:
    """The source of a file's prompts: its name without its ending, as `project` of `project.json`.

    Earlier versions took off `.jsonl` alone. A source that a database has from them stays
    `project.json`: its people get the new tasks, and `--replace` finds its rankings.

    Args:
        file_name: the name without folders.
        db: the database into which it is imported.
    """
    short = ENDING.sub("", file_name)
    earlier = file_name.removesuffix(".gz").removesuffix(".jsonl")
    if db is None or earlier == short:
        return short
    return last_name(db, (short, earlier)) or short


def _source_of(path: Path, db: Path) -> str:
    if not path.is_file():
        return path.name if is_hub_name(path) else path.stem
    if not db.is_file() or not db.stat().st_size:  # made only for a file that can be read
        return source_for(path.name)
    with Store(db) as store:
        return source_for(path.name, store.connections.db)


def read_entries(
    path: Path,
    defaults: Defaults,
    on_error: OnError,
    report: Report,
    part: Part,
    progress: Progress | None = None,
) -> Iterator[Placed]:
    """Yield the entry of each line with its location, and count the lines, touching no database.

    Raises:
        BadLineError: a bad line, unless it is left out.
        InputError: the file cannot be read.
    """
    repeats = Repeats()
    for location, row, split in read_rows(path, part, progress):
        report.lines += 1
        with _named(location, on_error, report):
            if isinstance(row, BadLineError):
                raise row
            value = parse_line(row, location) if isinstance(row, str) else row
            with _in_columns(path):
                entry = read_entry(value, replace(defaults, split=split) if split else defaults)
            report.count_entry(entry)
            require_one_question(report.questions)
            yield location, repeats.numbered(entry)
