"""`rlhf import`: prompts, responses and judgements into the label database."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which files to read, and what to assume where a line does not say it."""

    # Not keyword-only: files are given without a flag.
    files: Annotated[tuple[Path, ...], Parameter(name="--files", negative="")] = field(
        kw_only=False
    )
    """JSON Lines (also .gz), Parquet or CSV files, folders of them or of `datasets`, hub names."""
    db: Path
    """The label database; created when it does not exist."""
    split: Literal["train", "test"] = "train"
    """Split of prompts that do not say theirs."""
    source: str = ""
    """Source of prompts that do not say theirs; the file's name when not given."""
    annotator: str = ""
    """Who made judgements that do not say it; imported when not given."""
    kind: Literal["human", "ai", "signal"] | None = None
    """What kind of annotator that is; human when not given, ai for UltraFeedback."""
    on_error: Literal["few", "skip", "stop"] = "few"
    """few: skip lines with nothing to judge (e.g. an empty response) if fewer than 1 in 100, stop
    at any other bad line; skip: skip and count all; stop: stop at the first. A stopped file stores
    nothing."""
    data_split: str = ""
    """Read this split of a data set; all of them when not given, if they are train and test."""
    config_name: str = ""
    """Read this configuration of a data set; its default one when not given."""
    streaming: bool = False
    """Read a data set of the hub as it comes, without keeping a copy on disk."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("No file to import", "Name one: rlhf import prompts.jsonl --db DB")


def run(settings: Settings) -> dict[str, Any]:
    """Bring prompts, responses and judgements into the label database; safe to run again."""
    from labeling_app.data_io.formats import Defaults
    from labeling_app.data_io.importing import Report, import_file
    from labeling_app.data_io.reading import Part, require_there
    from labeling_app.db.store import Store

    defaults = Defaults(
        split=settings.split,
        source=settings.source,
        annotator=settings.annotator,
        kind=settings.kind,
    )
    part = Part(
        data_split=settings.data_split,
        config_name=settings.config_name,
        streaming=settings.streaming,
    )
    for path in settings.files:
        require_there(path, part)
    report = Report()
    for path in settings.files:
        report.add(import_file(path, settings.db, defaults, settings.on_error, part))
    with Store(settings.db) as store:
        return {**asdict(report), "db": str(settings.db), "in_db": store.counts()}
