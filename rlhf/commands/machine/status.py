"""`rlhf status`: what each stage of a run did, side by side for several runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rlhf.commands.deployment import benchmark, quantize
from rlhf.commands.machine import loop
from rlhf.commands.models import distill, dpo, evaluate, ppo, reference, sft, train_reward
from rlhf.errors import ConfigError

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
    """Which runs to show."""

    # Not keyword-only: runs are given without a flag.
    runs: Annotated[tuple[Path, ...], Parameter(name="--runs", negative="")] = field(kw_only=False)
    """Folders of runs or of single stages."""
    full: bool = False
    """Also show settings, last steps, reports and curves, side by side."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("No run to show", "Name one: rlhf status runs/NAME")


def run(settings: Settings) -> dict[str, Any]:
    """Show what each stage of a run did, and in which settings several runs differ."""
    from rlhf.run.status import differing_settings, read_run

    kinds = {stage: command.Settings for stage, command in STAGES.items()}
    runs = {str(path): read_run(path, kinds) for path in settings.runs}
    return {"runs": runs, "differing_settings": differing_settings(runs)}


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """A line for each stage, how several runs compare; with --full a table for each stage."""
    from rlhf.run.status import overview, tables

    show = tables if settings.full else overview
    return show(result["runs"], result["differing_settings"])
