"""A stage that only tests know, opened and finished."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.run.rundir import RunDir, open_stage, stage_status

INPUTS = {"model": {"path": "m", "hash": "abc"}}


@dataclass(frozen=True, kw_only=True)
class Settings:
    out: Path
    seed: int = 3
    steps: int = 10
    rate: float = 3e-6
    files: tuple[str, ...] = ("a",)
    resume: bool = False
    notify: str = ""
    shard: str | None = None


def open_ppo(
    out: Path, inputs: dict[str, dict[str, str]] = INPUTS, resume: bool = False, **changes: Any
) -> RunDir:
    settings = Settings(out=out, resume=resume, **changes)
    return open_stage(out, "ppo", settings, inputs, resume=resume)


def finish(run: RunDir) -> None:
    with stage_status(run):
        run.policy.mkdir()
