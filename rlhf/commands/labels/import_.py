"""`rlhf import`: prompts, responses and judgments into the label database."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from rlhf.commands.wording import listed, next_command
from rlhf.errors import ConfigError
from rlhf.records.wording import counted

EXAMPLE = "rlhf import prompts.jsonl --db labels.db"
SHOWN_BAD = 20  # lines left out; --json has more
HELD = ("prompts", "responses", "rankings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which files to read, and what to assume where a line says nothing."""

    # Not keyword-only: files are given without a flag.
    files: Annotated[tuple[Path, ...], Parameter(name="--files", negative="")] = field(
        kw_only=False
    )
    """Files to import: JSON Lines (also .gz), Parquet, CSV, or JSON exports of Argilla and Label
    Studio. Also folders of such files, folders saved by `datasets`, and names of datasets on the
    hub."""
    db: Path
    """The label database; created if it does not exist."""
    split: Literal["train", "test"] | None = None
    """Split of prompts that name none in a "split" field. Default: train; of a dataset, the part
    that they are in. A dataset of which both train and test are read keeps these two. To choose
    which part of a dataset to read, use --data-split."""
    source: str = ""
    """Source to store for prompts without a "source" field. Default: the file's name without its
    extension."""
    annotator: str = ""
    """Annotator to store for judgments that name none. Default: imported."""
    kind: Literal["human", "ai", "signal"] | None = None
    """Kind of --annotator: human, ai (a judge model) or signal (a function). Default: human; for
    UltraFeedback, ai."""
    on_error: Literal["few", "skip", "stop"] = "few"
    """What to do about bad lines. `few`: skip lines with nothing to judge (such as an empty
    response) if they are fewer than 1 in 100, and stop at any other bad line. `skip`: skip and
    count all bad lines. `stop`: stop at the first. If an import stops, nothing of that file is
    stored."""
    replace: bool = False
    """For a newer export of an Argilla or Label Studio project: rankings from earlier imports of
    the same source (--source, else the file's name) that are missing from this file are no longer
    counted or exported. Takes one file."""
    data_split: str = ""
    """Split of a dataset to read, such as validation. Default: all, if they are named train and
    test. To mark its prompts as training or test prompts, add --split."""
    config_name: str = ""
    """Configuration (subset) of a dataset to read; default: the dataset's default."""
    streaming: bool = False
    """Read a dataset from the hub without keeping a copy on disk."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("No file to import", "Name one: rlhf import prompts.jsonl --db DB")
        if self.replace and len(self.files) > 1:
            raise ConfigError(
                f"--replace takes one file, and {len(self.files)} are named",
                f"Import one at a time: rlhf import {self.files[0]} --replace --db {self.db}",
            )


def run(settings: Settings) -> dict[str, Any]:
    """Read prompts, responses and judgments into the label database; safe to run again."""
    from labeling_app.data_io.formats import Defaults
    from labeling_app.data_io.importing import Report, import_file
    from labeling_app.data_io.reading import Part, require_there
    from labeling_app.db.store import Store

    defaults = Defaults(
        split=settings.split or "train",
        source=settings.source,
        annotator=settings.annotator,
        kind=settings.kind,
    )
    part = Part(
        data_split=settings.data_split,
        split=settings.split,
        config_name=settings.config_name,
        streaming=settings.streaming,
    )
    for path in settings.files:
        require_there(path, part)
    report = Report()
    replaces = settings.replace
    for path in settings.files:
        report.add(
            import_file(
                path, settings.db, defaults, settings.on_error, part, replace_earlier=replaces
            )
        )
    with Store(settings.db) as store:
        in_db, splits = store.counts(), store.prompts_by_split()
    return {**asdict(report), "db": str(settings.db), "in_db": in_db, "splits": splits}


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """What is new, what was left out and why, and what the database holds now."""
    from labeling_app.data_io.fields import ignored_in_words, read_in_words, unnamed_in_words

    held = result["in_db"]
    lines = [f"{_imported(result)}{_left_out(result)}", *_bad_lines(result)]
    if returned := result["returned"]:
        count = "counts" if returned == 1 else "count"
        lines.append(f"{counted(returned, 'ranking')} that --replace had retired {count} again.")
    if before := result["unnamed_before"]:
        lines.append(unnamed_in_words(before, "--annotator NAME"))
    if read := read_in_words(result):
        lines.append(read)
    if ignored := ignored_in_words(result["ignored_fields"]):
        lines.append(ignored)
    if settings.replace:
        lines.append(_replaced(result))
    if result["new_checks"]:
        lines.append(f"{counted(result['new_checks'], 'gold or training task')} will be mixed in.")
    if result["checks_not_made"]:
        refused = counted(result["checks_not_made"], "gold or training task")
        lines.append(f"{refused} not made, the first: {result['first_not_made'][0]}")
    prompts, responses, rankings = (counted(held[name], name[:-1]) for name in HELD)
    splits = ", ".join(f"{number:,} {split}" for split, number in result["splits"].items())
    lines.append(f"{settings.db} holds {prompts} ({splits}), {responses} and {rankings}.")
    if not held["responses"]:
        lines.append(next_command("generate", db=settings.db, model="MODEL"))
    elif held["rankings"]:
        lines.append(next_command("export", db=settings.db, out="rankings"))
    else:
        lines.append(next_command("label", db=settings.db))
    return "\n".join(lines)


def _imported(result: dict[str, Any]) -> str:
    prompts, rankings = result["new_prompts"], result["new_rankings"]
    if prompts and rankings:
        return f"Imported {counted(rankings, 'ranking')} of {counted(prompts, 'prompt')}"
    new = [counted(result[f"new_{name}"], name[:-1]) for name in HELD if result[f"new_{name}"]]
    return f"Imported {listed(new)}" if new else "Nothing new: all of it was imported before"


def _replaced(result: dict[str, Any]) -> str:
    if result["other_sources"]:
        return (
            "Nothing was replaced: no earlier import has this source. To name one, add --source: "
            f"{listed(result['other_sources'])}."
        )
    earlier = counted(result["replaced"], "earlier ranking")
    return (
        f"{earlier} of this source {'was' if result['replaced'] == 1 else 'were'} replaced and no "
        f"longer counted; {result['unchanged']:,} unchanged."
    )


def _left_out(result: dict[str, Any]) -> str:
    """The end of the first sentence: how many lines were left out, and which if it is one."""
    if not result["bad_lines"]:
        return "."
    lines = counted(result["bad_lines"], "line")
    if result["bad_lines"] > 1:
        return f"; {lines} left out:"
    return f"; {lines} left out: {result['first_bad'][0].rstrip('.')}."


def _bad_lines(result: dict[str, Any]) -> list[str]:
    """Several lines that were left out, one below the other."""
    if result["bad_lines"] < 2:
        return []
    shown = [f"  {bad}" for bad in result["first_bad"][:SHOWN_BAD]]
    num_more = result["bad_lines"] - len(shown)
    return [*shown, f"  and {num_more:,} more"] if num_more else shown
