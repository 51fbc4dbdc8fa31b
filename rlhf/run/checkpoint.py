"""Saves and resumes a training loop, atomically and for every rank.

checkpoints/step-000100/   state/ (weights, optimizer), rng-N.pt of every rank, progress.json
checkpoints/latest         the name of the newest complete one

PyTorch's distributed checkpoint stores weights by name, however they are sharded, so a run can
continue with another number of processes, or with another of `auto`, `ddp` and `fsdp`. DeepSpeed
has its own format, which needs the same ZeRO stage and number of processes. With the same number of
processes a resumed run equals an uninterrupted one bit for bit; else random numbers differ.

`--checkpoint.asynchronous` writes the same files in a thread while the training goes on. DeepSpeed
writes from the tensors that the training changes, so there it is refused.
"""

import json
import random
import re
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import ProcessGroup, barrier
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError
from rlhf.parallel.master_weights import MasterOptimizer, float32_model
from rlhf.parallel.sharding import is_zero
from rlhf.records.jsonl import flush, flush_folder, write_json, write_text_atomically
from rlhf.run.saving.saved_state import load_data
from rlhf.run.watchdog import beat

LATEST = "latest"
PROGRESS = "progress.json"
STATE = "state"
WRITTEN_BY = "written_by"
WITHOUT_GROUP = "torch.distributed is disabled"
STEP_FOLDER = re.compile(r"step-\d+")
# Frozen weights are read from the model that the run started from.
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, progress: dict[str, Any], keep: int
) -> Path:
    """Write the state after `step`, and delete all but the newest `keep`; all ranks call this.

    `progress` are the JSON values that the loop needs to continue.
    """
    beat("saving", step)
    return write_snapshot(accelerator, folder, keep, Snapshot.of(accelerator, step, progress))


@dataclass(frozen=True)
class Snapshot:
    """What one process writes into a checkpoint.

    Attributes:
        step: after which it was taken.
        progress: of the loop, as JSON values.
        random: states of the random generators.
        state: of model and optimizer; None under DeepSpeed, which writes its own.
    """

    step: int
    progress: dict[str, Any]
    random: dict[str, Any]
    state: dict[str, Any] | None

    @classmethod
    def of(cls, accelerator: Accelerator, step: int, progress: dict[str, Any]) -> Self:
        """The present state, in the tensors that the training changes."""
        model, optimizers = _prepared(accelerator)
        state = None if is_zero(model) else _read_state(model, optimizers)
        return cls(step, progress, random_states(), state)

    def copied(self) -> Self:
        """The same, in tensors of its own in main memory."""
        return replace(
            self,
            progress=deepcopy(self.progress),
            state=BlockingAsyncStager().stage(self.state or {}),
        )


def write_snapshot(
    accelerator: Accelerator,
    folder: Path,
    keep: int,
    snapshot: Snapshot,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint; `group` are all processes, in a group of their own for a thread."""
    final = checkpoint_folder(folder, snapshot.step)
    partial = folder / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait_for_everyone(accelerator, group)
    _save_state(accelerator, partial, snapshot.state, group)
    torch.save(snapshot.random, partial / f"rng-{accelerator.process_index}.pt")
    _wait_for_everyone(accelerator, group)
    if accelerator.is_main_process:
        written_by = {"processes": accelerator.num_processes, "format": _format(accelerator)}
        content = {"step": snapshot.step, **snapshot.progress, WRITTEN_BY: written_by}
        write_json(partial / PROGRESS, content)
        flush_folder(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(folder)
        write_text_atomically(folder / LATEST, lambda stream: stream.write(final.name))
        flush(folder)
        # a run resumed from an earlier step may have left later checkpoints: keep the new one
        checkpoints = sorted(folder.glob("step-*"), key=lambda path: (path == final, path.name))
        for old in checkpoints[:-keep]:
            shutil.rmtree(old)
    _wait_for_everyone(accelerator, group)
    return final


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The folder of a complete checkpoint."""
    return folder / f"step-{step:06d}"


def _wait_for_everyone(accelerator: Accelerator, group: ProcessGroup | None) -> None:
    if group is None:
        accelerator.wait_for_everyone()
    else:
        barrier(group)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a resumed run would start from.

    Raises:
        InputError: `latest` does not name a checkpoint.
    """
    latest = folder / LATEST
    if not latest.is_file():
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not STEP_FOLDER.fullmatch(name):
        raise InputError(
            f"{latest} does not name a checkpoint ({name[:80]!r})", _try_another(folder)
        )
    return folder / name


def _try_another(folder: Path) -> str:
    return (
        f"Put the name of another checkpoint into {folder / LATEST}, or delete {folder} to start "
        "again."
    )


def last_good(checkpoint: Path | None) -> str:
    """A clause that names the checkpoint from which a stopped run can be resumed."""
    return f"{checkpoint} is the last good checkpoint" if checkpoint else "No checkpoint was saved"


def load_checkpoint(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint into the prepared model and optimizer; None without one.

    Returns:
        The `progress` that was saved with it, and `step`.

    Raises:
        InputError: the checkpoint is missing or broken, or its format is DeepSpeed's and this run's
            is not, or the other way round.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    if not (newest / PROGRESS).is_file():
        raise InputError(
            f"{newest} is gone or incomplete, though {folder / LATEST} names it",
            _try_another(folder),
        )
    with as_input_error(f"Cannot read {newest}", _try_another(folder)):
        progress: dict[str, Any] = json.loads((newest / PROGRESS).read_text(encoding="utf-8"))
        written_by = progress.pop(WRITTEN_BY)
        if not isinstance(progress["step"], int):
            raise TypeError(f"its {PROGRESS} has no step")
        _require_readable(accelerator, newest, written_by)
        _load_state(accelerator, newest)
        if written_by["processes"] == accelerator.num_processes:
            states = newest / f"rng-{accelerator.process_index}.pt"
            set_random_states(torch.load(states, weights_only=True))
    return progress


def _prepared(accelerator: Accelerator) -> tuple[nn.Module, list[Optimizer]]:
    """The model and the plain optimizers that `rlhf.parallel.sharding.prepare` has registered.

    Of bf16 weights the masters, which are saved as those of any other precision.
    """
    wrapped = accelerator._optimizers
    model = float32_model(accelerator._models[0], *wrapped) if wrapped else accelerator._models[0]
    return model, [getattr(optimizer, "optimizer", optimizer) for optimizer in wrapped]


def _format(accelerator: Accelerator) -> str:
    """The name of the format of this run's state."""
    model: Any = accelerator._models[0]
    return f"zero{model.zero_optimization_stage()}" if is_zero(model) else "torch"


def _require_readable(accelerator: Accelerator, path: Path, written_by: dict[str, Any]) -> None:
    mine, theirs = _format(accelerator), written_by["format"]
    if mine == theirs == "torch":
        return
    if mine != theirs:
        option = f"--sharding {theirs}" if theirs != "torch" else "--sharding auto, ddp or fsdp"
        raise InputError(
            f"{path} has the format {theirs!r}, this run reads {mine!r}", f"Resume with {option}."
        )
    if written_by["processes"] != accelerator.num_processes:
        raise InputError(
            f"{path} was written by {written_by['processes']} processes under DeepSpeed, this run "
            f"has {accelerator.num_processes}",
            f"Resume with --processes {written_by['processes']}.",
        )


def _save_state(
    accelerator: Accelerator,
    folder: Path,
    state: dict[str, Any] | None,
    group: ProcessGroup | None,
) -> None:
    if state is None:
        engine: Any = accelerator._models[0]
        engine.save_checkpoint(str(folder), tag=STATE, save_latest=False)
        return
    with _alone(accelerator) as alone:
        state_dict_saver.save(
            state, checkpoint_id=folder / STATE, process_group=group, no_dist=alone
        )


def _read_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=TRAINED)}
    if optimizers:
        state["optimizer"] = get_optimizer_state_dict(model, optimizers, options=TRAINED)
    return state


def _load_state(accelerator: Accelerator, folder: Path) -> None:
    model, optimizers = _prepared(accelerator)
    if is_zero(model):
        from rlhf.parallel import zero

        zero.load_state(model, folder, STATE)
        return
    content = _read_state(model, optimizers)
    with _alone(accelerator) as alone:
        load_data(content, folder / STATE, alone=alone)
    set_model_state_dict(model, content["model"], options=TRAINED)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, content["optimizer"], options=TRAINED)
    for optimizer in accelerator._optimizers:
        if isinstance(optimizer, MasterOptimizer):
            optimizer.round_again()


@contextmanager
def _alone(accelerator: Accelerator) -> Iterator[bool]:
    """True for a single process, where PyTorch's warning about a missing group is suppressed."""
    if threading.current_thread() is not threading.main_thread():  # all threads share the filters
        yield accelerator.num_processes == 1
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", WITHOUT_GROUP, UserWarning)
        yield accelerator.num_processes == 1


def random_states() -> dict[str, Any]:
    """The states of all random generators, in types that torch.load reads as data."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
