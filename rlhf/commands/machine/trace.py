"""`rlhf trace`: where a ranking came from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which ranking."""

    # Not keyword-only: the id is given without a flag.
    ranking: Annotated[str, Parameter(name="--ranking")] = field(kw_only=False)
    """The ranking's id, as an export has it."""
    db: Path
    """The label database."""


def run(settings: Settings) -> dict[str, Any]:
    """Show a ranking's annotator and rubric, and of every response the model and the round."""
    from labeling_app.annotators.rounds import trace
    from labeling_app.db.store import Store

    with Store(settings.db, read_only=True) as store:
        return trace(store, settings.ranking)
