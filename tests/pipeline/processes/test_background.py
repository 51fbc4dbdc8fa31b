"""Two processes of a training are killed, and it resumes bit for bit, however it saves."""

import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.run.checkpoint import newest_checkpoint
from tests.conftest import build_tiny_model
from tests.pipeline.processes.background import EVERY, STEPS
from tests.servers.commands import Command, finish_group, start_group


def start(model: Path, run: Path, *, asynchronous: bool) -> list[Command]:
    words = ("-m", "tests.pipeline.processes.background", model, run, int(asynchronous))
    return start_group(2, *words)


def finish(group: list[Command]) -> None:
    done = finish_group(group)
    assert done.returncode == 0, done.stderr[-4000:]


def kill_after(group: list[Command], checkpoints: Path, step: int) -> None:
    """Kill all processes once a checkpoint of this step or a later one is there."""
    limit = time.monotonic() + 300
    while time.monotonic() < limit and all(one.poll() is None for one in group):
        newest = newest_checkpoint(checkpoints)
        if newest and int(newest.name.rpartition("-")[2]) >= step:
            break
        time.sleep(0.001)
    for process in group:
        process.kill()
    assert finish_group(group).returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing has disturbed, and its model."""
    folder = tmp_path_factory.mktemp("background")
    model = build_tiny_model(folder / "tiny")
    finish(start(model, folder / "straight", asynchronous=False))
    return folder


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_training_ends_like_an_undisturbed_one(
    straight: Path, tmp_path: Path, asynchronous: bool
) -> None:
    model = straight / "tiny"
    killed = start(model, tmp_path, asynchronous=asynchronous)
    kill_after(killed, tmp_path / "checkpoints", 2 * EVERY)
    assert not (tmp_path / "weights.safetensors").exists()
    finish(start(model, tmp_path, asynchronous=asynchronous))
    last = newest_checkpoint(tmp_path / "checkpoints")
    assert last is not None
    assert last.name == f"step-{STEPS // EVERY * EVERY:06d}"
    places = (straight / "straight", tmp_path)
    expected, found = (load_file(place / "weights.safetensors") for place in places)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], value) for name, value in found.items())
