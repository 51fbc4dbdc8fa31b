"""Previews, imports, exports and backups for the server, each in a process of its own.

Reading a file takes processor time that the board needs, and what a broken file does to a library
that reads it stays outside the server. A job is one JSON object on standard input, and its outcome
one on standard output: what came of it, or `error`. An import writes the share of the file that it
has read into the file `share` of its job.
"""

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from labeling_app.data_io.exporting import export
from labeling_app.data_io.fields import ignored_in_words, read_in_words
from labeling_app.data_io.formats import Defaults, Entry
from labeling_app.data_io.importing import (
    SKIP_BAD_LINES,
    OnError,
    Report,
    import_file,
    read_entries,
)
from labeling_app.data_io.reading import Part
from labeling_app.db.files.backup import back_up
from labeling_app.db.files.label_file import LostDatabaseError
from labeling_app.db.store import Store
from rlhf.diagnose import diagnose
from rlhf.errors import InputError, RlhfError
from rlhf.records.jsonl import Progress
from rlhf.records.schema import Split
from rlhf.records.wording import counted

Job = dict[str, Any]
SHOWN_ROWS = 5
SHOWN_CHARACTERS = 300
PREVIEW_SECONDS = 3.0
SHARE_SECONDS = 0.3  # between two writes of it
FAILED = {
    "preview": "The file could not be read",
    "store": "The file could not be imported",
    "archive": "The export could not be written",
    "backup": "The backup could not be written",
}


def main() -> None:
    """Do the job on standard input."""
    job = json.load(sys.stdin)
    name = job.pop("do")
    try:
        outcome = JOBS[name](job)
    except RlhfError as error:
        outcome = {"error": _sentence(error, job)}
    except (OSError, sqlite3.Error) as error:
        outcome = {"error": f"{FAILED[name]}: {_cause(error)}. Fix that, then try again."}
    sys.stdout.write(json.dumps(outcome))


def _cause(error: OSError | sqlite3.Error) -> str:
    """The cause of an error in a few words, without the server's paths."""
    known = None if isinstance(error, LostDatabaseError) else diagnose(error)
    if known is not None:
        cause = known.problem.partition(":")[0]  # the library's message follows
        return cause[0].lower() + cause[1:]
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _sentence(error: RlhfError, job: Job) -> str:
    """An error as the person who uploaded the file should read it: without the server's paths."""
    remedy = error.remedy.replace(SKIP_BAD_LINES, "choose that, and import")
    text = f"{error.problem.rstrip('.')}. {remedy}"
    if "db" in job:
        text = text.replace(job["db"], Path(job["db"]).name)
    return text.replace(job["path"], job["name"]) if "path" in job else text


def preview(job: Job) -> Job:
    """The first rows of a file, and its bad lines as far as `PREVIEW_SECONDS` reach.

    Raises:
        InputError: the file cannot be read, or has no good line.
    """
    report, is_whole = Report(), True
    rows: list[Job] = []
    prompts: dict[Split, set[str]] = {"train": set(), "test": set()}
    stop_at = monotonic() + PREVIEW_SECONDS
    entries = read_entries(Path(job["path"]), _defaults(job), "skip", report, Part())
    for location, entry in entries:
        if len(rows) < SHOWN_ROWS:
            rows.append(_row(location.rpartition(":")[2], entry))
        if entry.check is None:  # gold and training tasks are for neither
            prompts[entry.prompt.split].add(entry.prompt.id)
        if monotonic() > stop_at:
            is_whole = False
            break
    bad = _listed_bad(report, job)
    if not rows:
        first = f", the first: {bad[0]}" if bad else ""
        raise InputError(
            f"{job['name']} holds no line that can be imported{first}", "Choose another file."
        )
    counts = {"lines": report.lines, "bad_lines": report.bad_lines, "first_bad": bad}
    return {
        **counts,
        "splits": _splits_in_words(prompts),
        "read": read_in_words(vars(report)),
        "ignored": ignored_in_words(report.ignored_fields),
        "rows": rows,
        "is_whole": is_whole,
    }


def _splits_in_words(prompts: Mapping[Split, Collection[str]]) -> str:
    """The prompts of each split: "8 train prompts and no test prompts."; "" where none are."""
    if not any(prompts.values()):
        return ""
    train, test = (
        counted(len(ids), f"{split} prompt") if ids else f"no {split} prompts"
        for split, ids in prompts.items()
    )
    return f"{train} and {test}.".capitalize()


def _row(line: str, entry: Entry) -> Job:
    """The contents of one line, shortened."""
    letters = {response.id: chr(ord("A") + n) for n, response in enumerate(entry.responses)}
    ranked = [
        " > ".join(" = ".join(letters.get(id_, "?") for id_ in tier) for tier in ranking.tiers)
        for ranking in entry.rankings
    ]
    return {
        "line": line,
        "prompt": entry.prompt.text[:SHOWN_CHARACTERS],
        "responses": [response.text[:SHOWN_CHARACTERS] for response in entry.responses],
        "rankings": ranked,
        "split": entry.prompt.split,
        "source": entry.prompt.source,
    }


def store(job: Job) -> Job:
    """Import a file. Returns the report.

    Raises:
        InputError: the file cannot be imported; nothing of it is stored.
        InterruptedRunError: another import is running, or the disk is full.
    """
    on_error: OnError = "skip" if job["leave_out"] else "few"
    report = import_file(
        Path(job["path"]),
        Path(job["db"]),
        _defaults(job),
        on_error,
        Part(),
        replace_earlier=job["replace"],
        progress=_writer_of_share(Path(job["share"])),
    )
    return {**asdict(report), "first_bad": _listed_bad(report, job)}


def _listed_bad(report: Report, job: Job) -> list[str]:
    """The first bad lines, without the server's paths, and how many more there are."""
    listed = [text.replace(job["path"], job["name"]) for text in report.first_bad]
    num_more = report.bad_lines - len(listed)
    return [*listed, f"and {num_more:,} more"] if num_more else listed


def _writer_of_share(file: Path) -> Progress:
    next_at = monotonic()

    def write(share: float) -> None:
        nonlocal next_at
        if monotonic() >= next_at:
            with suppress(OSError):  # no reason to end an import: the folder is full, or gone
                partial = file.with_suffix(".partial")
                partial.write_text(f"{share:.3f}")
                partial.replace(file)
            next_at = monotonic() + SHARE_SECONDS

    return write


def _defaults(job: Job) -> Defaults:
    return Defaults(
        split=job["split"], source=job["source"], annotator=job["annotator"], kind=job["kind"]
    )


def archive(job: Job) -> Job:
    """Export the rankings into `folder` and pack that into `folder`.zip.

    Raises:
        InputError: there is nothing to export.
    """
    folder = Path(job["folder"])
    with Store(Path(job["db"]), read_only=True) as opened:
        export(opened, folder, job["format"])
    packed = shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)
    return {"archive": packed}


def backup(job: Job) -> Job:
    """Copy the database into one new file. Returns its counts.

    Raises:
        InputError: the copy cannot be written.
    """
    return dict(back_up(Path(job["db"]), Path(job["out"])))


JOBS: dict[str, Callable[[Job], Job]] = {
    "preview": preview,
    "store": store,
    "archive": archive,
    "backup": backup,
}

if __name__ == "__main__":
    main()
