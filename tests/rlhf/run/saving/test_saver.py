"""Checkpoints that are written while the training goes on. A slow disk is a slow `torch.save`."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils._pytree import tree_leaves

from reward.settings import RewardSettings
from rlhf.errors import ConfigError, InterruptedRunError
from rlhf.parallel.settings import CheckpointSettings
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.run.checkpoint import Snapshot, load_checkpoint, newest_checkpoint
from rlhf.run.saving.saver import Saver
from tests.rlhf.run.saving.loop import Loop, names
from tests.servers.commands import run_program

SECONDS = 2.0  # longer than a busy machine may let this process wait


@pytest.fixture
def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes SECONDS to begin with each checkpoint, which is many calls."""
    plain: Callable[..., None] = torch.save
    last = 0.0

    def save(*given: Any, **named: Any) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS / 4:
            time.sleep(SECONDS)
        last = time.monotonic()
        plain(*given, **named)

    monkeypatch.setattr(torch, "save", save)


def new_saver(loop: Loop, folder: Path, *, asynchronous: bool = True, every: int = 1) -> Saver:
    settings = CheckpointSettings(every=every, asynchronous=asynchronous)
    return Saver(loop.accelerator, folder, settings)


@pytest.mark.usefixtures("_slow_disk")
def test_the_training_goes_on_meanwhile_and_resumes_exactly_where_it_was(tmp_path: Path) -> None:
    loop = Loop()
    saver = new_saver(loop, tmp_path, every=3)
    with saver.saving_on_sigterm():
        loop.steps(3)
        progress = {"seen": [1, 2]}
        began = time.monotonic()
        saver.after_step(3, progress)
        progress["seen"].append(3)
        expected = loop.steps(4)
        assert time.monotonic() - began < SECONDS
        assert newest_checkpoint(tmp_path) is None
    assert names(tmp_path) == ["latest", "step-000003"]
    resumed = Loop()
    assert load_checkpoint(resumed.accelerator, tmp_path) == {"step": 3, "seen": [1, 2]}
    assert resumed.steps(4) == expected


@pytest.mark.usefixtures("_slow_disk")
def test_one_is_written_before_the_next_begins(tmp_path: Path) -> None:
    loop = Loop()
    saver = new_saver(loop, tmp_path)
    with saver.saving_on_sigterm():
        saver.after_step(1, {})
        saver.after_step(2, {})
        assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    assert names(tmp_path) == ["latest", "step-000002"]


def test_the_files_are_those_of_a_training_that_waits(tmp_path: Path) -> None:
    loop = Loop()
    loop.steps(2)
    contents = []
    for asynchronous in (False, True):
        saver = new_saver(loop, tmp_path / str(asynchronous), asynchronous=asynchronous)
        with saver.saving_on_sigterm():
            saver.after_step(1, {"fact": 1})
        folder = tmp_path / str(asynchronous)
        files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pt"]
        files = [path for path in files if path.name != ".metadata"]  # with a random name in it
        contents.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert contents[0] == contents[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_written_ends_the_training(
    tmp_path: Path, asynchronous: bool
) -> None:
    (tmp_path / "file").write_text("")
    loop = Loop()
    saver = new_saver(loop, tmp_path / "file" / "checkpoints", asynchronous=asynchronous)
    with pytest.raises(NotADirectoryError), saver.saving_on_sigterm():
        saver.after_step(1, {})


def test_the_training_ends_at_the_step_after_the_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loop = Loop()
    saver = new_saver(loop, tmp_path / "file" / "checkpoints", every=2)
    saver.after_step(2, {})
    time.sleep(SECONDS)
    with pytest.raises(NotADirectoryError):
        saver.after_step(3, {})


@pytest.mark.usefixtures("_slow_disk")
def test_a_training_that_fails_waits_for_its_checkpoint_and_says_why_it_failed(
    tmp_path: Path,
) -> None:
    saver = new_saver(Loop(), tmp_path)

    def train() -> None:
        with saver.saving_on_sigterm():
            saver.after_step(1, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert names(tmp_path) == ["latest", "step-000001"]


@pytest.mark.usefixtures("_slow_disk")
def test_a_stop_on_request_waits_for_both(tmp_path: Path) -> None:
    saver = new_saver(Loop(), tmp_path)

    def train() -> None:
        with saver.saving_on_sigterm():
            saver.after_step(1, {})
            os.kill(os.getpid(), signal.SIGTERM)
            saver.after_step(2, {})

    with pytest.raises(InterruptedRunError, match=r"the state is in .*step-000002"):
        train()
    assert names(tmp_path) == ["latest", "step-000002"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from torch.utils._pytree import tree_leaves
from rlhf.parallel.settings import CheckpointSettings
from rlhf.run.saving.saver import Saver

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(3, 1))
saver = Saver(accelerator, folder, CheckpointSettings(every=1, asynchronous=True))
saver.after_step(1, {"good": True})
while not (folder / "latest").is_file():
    time.sleep(0.01)
torch.save = lambda *_, **__: time.sleep(60)
saver.after_step(2, {"good": True})
while not (folder / ".step-000002.partial" / "state").is_dir():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_leaves_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(KILLED, encoding="utf-8")
    done = run_program(program, run)
    assert done.returncode == -9, done.stderr
    loop = Accelerator(cpu=True)
    loop.prepare(torch.nn.Linear(3, 1))
    assert load_checkpoint(loop, run) == {"step": 1, "good": True}


def test_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    usual = RewardSettings(rankings=Path("r"), model="m", out=Path("o"), sharding="zero2")
    assert choose_sharding(usual).zero_stage == 2
    checkpoint = replace(usual.checkpoint, asynchronous=True)
    with pytest.raises(ConfigError, match="asynchronous cannot be combined with --sharding zero2"):
        choose_sharding(replace(usual, checkpoint=checkpoint))


def test_a_copy_takes_twelve_bytes_for_each_trained_parameter() -> None:
    """As the help of --checkpoint.asynchronous says: a float32 weight and Adam's two moments."""
    loop = Loop()
    loop.steps(1)
    copied = Snapshot.of(loop.accelerator, 1, {}).copied()
    leaves = [one for one in tree_leaves(copied.state) if isinstance(one, torch.Tensor)]
    counts = sum(one.nbytes for one in leaves if one.dim() == 0)  # of steps, one for each tensor
    assert sum(one.nbytes for one in leaves) - counts == 12 * (3 + 1)
    assert all(one.device.type == "cpu" for one in leaves)
