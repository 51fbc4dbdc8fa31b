"""What vLLM refuses, with what to do instead. Runs where it is installed: `make test-vllm`."""

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm, in an environment of its own: make test-vllm")

from tests.conftest import build_tiny_model
from tests.policies.training import TrainingInputs, build_training
from tests.servers.commands import run_process

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM has some of its own


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> TrainingInputs:
    """With heads as wide as vLLM's attention on CPUs wants them."""
    folder = tmp_path_factory.mktemp("training")
    return build_training(folder, build_tiny_model(folder / "model", head_dim=32))


def test_a_model_that_it_cannot_run_is_refused(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tmp_path: Path
) -> None:
    training = build_training(tmp_path_factory.mktemp("narrow"), tiny_model)
    done = run_process(*training.arguments(tmp_path / "x", "--engine", "vllm"))
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert re.search(r"vLLM does not start with .* \(.*head_dim=8", words)
    assert "Use --engine generate, which samples from every model." in words


def test_processes_that_cannot_share_engines_evenly_are_refused(
    training: TrainingInputs, tmp_path: Path
) -> None:
    options = ("--engine", "vllm", "--engine-tensor-parallel", "3", "--processes", "2")
    done = run_process(*training.arguments(tmp_path / "out", *options))
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert "2 processes do not divide into groups of --sampling.engine-tensor-parallel 3" in words


def test_shared_memory_of_a_killed_engine_is_named(
    training: TrainingInputs, tmp_path: Path
) -> None:
    files = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in (0, 1)]
    for file in files:
        file.touch()
    try:
        options = ("--engine", "vllm", "--engine-tensor-parallel", "2", "--processes", "2")
        done = run_process(*training.arguments(tmp_path / "out", *options))
    finally:
        for file in files:
            file.unlink()
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    named = " ".join(f"'{file}'" for file in files)
    assert f"vLLM cannot make its shared memory, which is there already: {named}" in words
    assert f"Remove it: rm {named}" in words
