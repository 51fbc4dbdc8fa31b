"""`rlhf trace`: where a ranking came from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

EXAMPLE = "rlhf trace RANKING_ID --db labels.db"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which ranking."""

    # Not keyword-only: the id is given without a flag.
    ranking: Annotated[str, Parameter(name="--ranking")] = field(kw_only=False)
    """The ranking's id, from an export."""
    db: Path
    """The label database."""


def run(settings: Settings) -> dict[str, Any]:
    """Show who made a ranking, by which rubric, and the model and round of each response."""
    from labeling_app.annotators.rounds import trace
    from labeling_app.db.store import Store

    with Store(settings.db, read_only=True) as store:
        return trace(store, settings.ranking)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """Who ranked and why, then every response, the best first."""
    annotator, rubric = result["annotator"], result["rubric"]
    state = "counts" if result["live"] else "was replaced or taken back"
    lines = [f"{result['ranking']} is by {annotator['name']} ({annotator['kind']}); it {state}."]
    if result["reason"]:
        lines.append(f"The task was queued for: {result['reason']}.")
    if rubric["version"]:
        lines.append(f"Rubric {rubric['version']}: {rubric['text']}")
    for response in result["responses"]:
        model = (
            " ".join(filter(None, [response["model"], response["fingerprint"]]))
            or "an unknown model"
        )
        origin = f"round {response['round']}" if response["round"] else "before any round"
        lines.append(f"Place {response['tier']}: {response['id']} by {model}, {origin}.")
    return "\n".join(lines)
