"""`rlhf export`: rankings as a dataset."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from rlhf.commands.wording import listed
from rlhf.records.wording import counted

EXAMPLE = "rlhf export --db labels.db --out rankings"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which rankings to write, and how."""

    db: Path
    """The label database."""
    out: Path
    """New folder for the dataset."""
    format: Literal["ranked", "trl", "trl-conversational", "hh", "kto", "demonstrations"] = "ranked"
    """`ranked`: for `rlhf train-reward`. `demonstrations`: for `rlhf sft`. `trl`,
    `trl-conversational`, `kto`: for trl. `hh`: the format of Anthropic's HH."""
    kind: tuple[Literal["human", "ai", "signal"], ...] = ()
    """Only rankings by these kinds of annotators; default: all."""
    annotator: tuple[str, ...] = ()
    """Only rankings by these annotators; default: all."""
    names: bool = False
    """Write real names; default: a pseudonym for each person, the same in every export."""


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


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many rankings were written, by whom, and which command reads them."""
    kinds = listed([f"{count:,} {kind}" for kind, count in result["rankings_by_kind"].items()])
    unit = "prompts" if settings.format == "ranked" else "rows"
    splits = listed([f"{count:,} {split}" for split, count in result[unit].items()])
    text = (
        f"Exported {counted(result['rankings'], 'ranking')} ({kinds}) to {result['out']}: "
        f"{splits} {unit}."
    )
    left_out = []
    if result["replaced_by_decisions"]:
        replaced = counted(result["replaced_by_decisions"], "ranking")
        left_out.append(f"{replaced} of tasks that a lead has decided")
    if result["prompts_without_responses"]:
        left_out.append(
            f"{counted(result['prompts_without_responses'], 'prompt')} without responses"
        )
    if left_out:
        text += f" Left out: {listed(left_out)}."
    if settings.format == "ranked" and not result["prompts"].get("test"):
        text += (
            " There are no test prompts, with which accuracy is measured; to add some: "
            f"rlhf import FILE --db {quote(str(settings.db))} --split test"
        )
    following = {
        "ranked": f"train-reward --rankings {settings.out} --model MODEL --out runs/NAME/reward",
        "demonstrations": f"sft --demonstrations {settings.out} --model MODEL --out runs/NAME/sft",
    }.get(settings.format)
    return f"{text}\nNext: rlhf {following}" if following else text
