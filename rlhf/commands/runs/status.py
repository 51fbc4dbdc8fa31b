"""`rlhf status`: what each stage of a run did; which of two served policies people like better."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rlhf.commands.deployment import benchmark, quantize
from rlhf.commands.idle_settings import refuse_idle
from rlhf.commands.models import distill, dpo, evaluate, ppo, reference, sft, train_reward
from rlhf.commands.runs import loop
from rlhf.errors import ConfigError
from rlhf.records.wording import counted

EXAMPLE = "rlhf status runs/first runs/second"
STAGES = {
    "loop": loop,
    "sft": sft,
    "reward": train_reward,
    "reference": reference,
    "ppo": ppo,
    "dpo": dpo,
    "distill": distill,
    "evaluate": evaluate,
    "quantize": quantize,
    "benchmark": benchmark,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which runs or served policies to show."""

    # Not keyword-only: runs are given without a flag.
    runs: Annotated[tuple[Path, ...], Parameter(name="--runs", negative="")] = field(
        default=(), kw_only=False
    )
    """Folders of runs or of single stages, or a folder of runs."""
    db: Path | None = None
    """A label database with feedback on served policies (`rlhf serve`): shows how many responses
    and thumbs each policy has, and compares two (`--against`). The comparisons stay valid however
    often you look."""
    full: bool = False
    """Also show settings, last steps, reports and curves, side by side."""

    def __post_init__(self) -> None:
        if not self.runs:
            refuse_idle(self, ["full"], "without a run")


def run(settings: Settings) -> dict[str, Any]:
    """Show what each stage of a run did, and compare several runs: results, cost, settings."""
    if not (settings.runs or settings.db):
        raise ConfigError("No run to show", "Name one: rlhf status runs/NAME")
    from rlhf.commands.runs.compare_runs import summaries
    from rlhf.run.status import differing_settings, read_run, run_folders

    kinds = {stage: command.Settings for stage, command in STAGES.items()}
    folders = [folder for path in settings.runs for folder in run_folders(path)]
    runs = {str(path): read_run(path, kinds) for path in folders}
    report = {
        "runs": runs,
        "compared": {
            line: summary
            for name, stages in runs.items()
            for line, summary in summaries(name, stages).items()
        },
        "differing_settings": differing_settings(runs),
    }
    return report | (_content(settings.db) if settings.db else {})


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """A line for each run of several, and for each stage; with --full a table for each stage."""
    from rlhf.commands.runs.compare_runs import comparison
    from rlhf.run.status import overview, tables

    show = tables if settings.full else overview
    parts = [show(result["runs"], result["differing_settings"])] if settings.runs else []
    if len(result["compared"]) > 1 and not settings.full:
        parts.insert(0, comparison(result["compared"]))
    if settings.db:
        if result["served"]:
            parts.append("\n".join(map(_describe_served, result["served"])))
        parts += map(describe_comparison, result["comparisons"])
        if not (result["served"] or result["comparisons"]):
            parts.append(_describe_labels(settings.db, result["labels"]))
    return "\n\n".join(parts)


def _content(db: Path) -> dict[str, Any]:
    """Every policy that was served by itself, every comparison of two, and how much is ranked.

    The newest comparison comes last.
    """
    from labeling_app.db.answers.served import comparisons, served_alone
    from labeling_app.db.store import Store
    from policies.serving.thumbs.comparison import compare_thumbs

    with Store(db, read_only=True) as store:
        rows, served = comparisons(store.connections), served_alone(store.connections)
        labels = store.counts()
    outcomes = []
    for row in rows:
        compared = compare_thumbs(row["thumbs"])
        for variant in ("policy", "against"):
            compared[variant]["name"] = row[variant]
        outcomes.append({"share": row["share"], "started_at": row["started_at"], **compared})
    return {"served": served, "comparisons": outcomes, "labels": labels}


def _describe_labels(db: Path, labels: Mapping[str, int]) -> str:
    """The contents of a database to which no served policy writes."""
    prompts, responses, rankings, tasks = (
        counted(labels[name], name[:-1]) for name in ("prompts", "responses", "rankings", "tasks")
    )
    return (
        f"{db} holds {prompts}, {responses} and {rankings}; {labels['open']:,} of {tasks} "
        f"are open.\nNo response is of a served policy: rlhf serve --policy RUN --db {db}"
    )


def _describe_served(policy: Mapping[str, Any]) -> str:
    """A policy that was served by itself, in a line."""
    from rlhf.run.intervals import in_words

    up, down, share = policy["up"], policy["down"], policy["share"]
    thumbs = f"{up:,} thumbs up, {down:,} down, {in_words(share)} up" if share else "no thumbs yet"
    return f"{policy['model']}: {counted(policy['responses'], 'response')}, {thumbs}"


def describe_comparison(compared: Mapping[str, Any]) -> str:
    """A comparison in a few lines.

    Args:
        compared: of `compare_thumbs`, with the `name` of both policies.
    """
    lines = [_count_thumbs(compared[variant]) for variant in ("policy", "against")]
    difference = compared["difference"]
    if difference["value"] is None:
        return "\n".join([*lines, "No comparison yet: one of them has no thumbs."])
    low, high = 100 * difference["low"], 100 * difference["high"]
    lines.append(
        f"Difference {100 * difference['value']:+.0f} points (95 % interval {low:+.0f} to "
        f"{high:+.0f}, which holds whenever you look)."
    )
    better = compared["better"]
    lines.append(
        f"People like {compared[better]['name']} better."
        if better
        else "Which one people like better is not known yet."
    )
    return "\n".join(lines)


def _count_thumbs(policy: Mapping[str, Any]) -> str:
    total = policy["up"] + policy["down"]
    rate = "" if policy["rate"] is None else f", {100 * policy['rate']:.0f} % up"
    return f"{policy['name']}: {total:,} thumb{'' if total == 1 else 's'}{rate}"
