"""The whole loop on the tiny model, run once through the command line."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.cli import main
from tests.conftest import build_once
from tests.pipeline.loop import Loop, run_loop


@pytest.fixture
def run_rlhf(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run one command in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(arguments))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Loop:
    """The whole loop, run once."""

    def build(folder: Path) -> None:
        shutil.copytree(tiny_model, folder / "tiny")
        (folder / "run").mkdir()
        run_loop(folder / "run", folder / "tiny")

    folder = build_once(tmp_path_factory, "loop", build)
    return Loop(folder / "run", folder / "tiny")
