"""Saving and resuming a training loop, atomically and for every rank.

checkpoints/step-000100/   accelerate's state (weights, optimizer, schedule, RNG of every rank)
                           and progress.json
checkpoints/latest         the name of the newest complete one
"""

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rlhf.errors import InputError
from rlhf.jsonl import write_json, write_text_atomically

LATEST = "latest"
PROGRESS = "progress.json"


def save_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, progress: dict[str, Any], keep: int
) -> Path:
    """Write the state after `step`; all ranks call this together.

    Args:
        accelerator: holds models, optimizers, schedules.
        folder: the run's checkpoints folder.
        step: steps done.
        progress: JSON values that the loop needs to go on.
        keep: how many checkpoints stay on disk.
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(partial / PROGRESS, {"step": step, **progress})
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        write_text_atomically(folder / LATEST, lambda stream: stream.write(final.name))
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def load_checkpoint(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint into what `accelerator` has prepared; None when there is none.

    Returns:
        The `progress` that was saved with it, and `step`.

    Raises:
        InputError: the checkpoint is gone, or was written by another number of processes.
    """
    if not (folder / LATEST).is_file():
        return None
    newest = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    if not (newest / PROGRESS).is_file():
        raise InputError(
            f"{newest} is gone or incomplete, though {folder / LATEST} names it",
            f"Put the name of another checkpoint there, or delete {folder} to start again.",
        )
    ranks = len(list(newest.glob("random_states_*.pkl")))
    if ranks != accelerator.num_processes:
        raise InputError(
            f"{newest} was written by {ranks} processes, this run has {accelerator.num_processes}",
            f"Resume with --processes {ranks}.",
        )
    accelerator.load_state(str(newest))
    progress: dict[str, Any] = json.loads((newest / PROGRESS).read_text(encoding="utf-8"))
    return progress
