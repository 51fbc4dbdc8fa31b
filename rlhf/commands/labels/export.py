"""`rlhf export`: rankings as a dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which rankings to write, and how."""

    db: Path
    """The label database."""
    out: Path
    """The folder to make; it must not exist."""
    format: Literal["ranked", "trl", "trl-conversational", "hh", "kto", "demonstrations"] = "ranked"
    """ranked is for `rlhf train-reward`, demonstrations for `rlhf sft`; the others are for trl."""
    kind: tuple[Literal["human", "ai", "signal"], ...] = ()
    """Only rankings by these kinds of annotator; all when not given."""
    annotator: tuple[str, ...] = ()
    """Only rankings by these annotators; all when not given."""
    names: bool = False
    """Write people's real names; otherwise each has a pseudonym that stays the same."""


def run(settings: Settings) -> dict[str, Any]:
    """Write the rankings as a dataset: one JSON Lines file per split and a manifest."""
    from labeling_app.data_io.exporting import export
    from labeling_app.db.store import Store

    with Store(settings.db, read_only=True) as store:
        manifest = export(
            store,
            settings.out,
            settings.format,
            kinds=settings.kind,
            annotators=settings.annotator,
            names=settings.names,
        )
    return {"out": str(settings.out), **manifest}
