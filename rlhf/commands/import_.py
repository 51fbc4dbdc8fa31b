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
    """JSON Lines (also .gz), Parquet or CSV files, or folders written by `datasets`."""
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
    on_error: Literal["skip", "stop"] = "stop"
    """What a bad line does: stop, with nothing of its file stored, or skip and count."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("No file to import", "Name one: rlhf import prompts.jsonl --db DB")


def run(settings: Settings) -> dict[str, Any]:
    """Bring prompts, responses and judgements into the label database; safe to run again."""
    from labeling_app.formats import Defaults
    from labeling_app.importing import read_files, store_entries
    from labeling_app.store import Store

    defaults = Defaults(
        split=settings.split,
        source=settings.source,
        annotator=settings.annotator,
        kind=settings.kind,
    )
    files, report = read_files(settings.files, defaults, settings.on_error)
    # Opened only now: a file that cannot be read must not leave an empty database behind.
    with Store(settings.db) as store:
        store_entries(store, files, report)
        return {**asdict(report), "db": str(settings.db), "in_db": store.counts()}
