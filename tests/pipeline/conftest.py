"""The whole loop on the tiny model, run once through the command line."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.cli import main
from tests.pipeline.loop import SHORT, SIGNAL, Loop, write_prompts


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
    """Run import … evaluate once; every command must exit with 0."""
    folder = tmp_path_factory.mktemp("loop")
    model = tmp_path_factory.mktemp("loop-model") / "tiny"
    shutil.copytree(tiny_model, model)
    done = Loop(folder, model)
    database, rankings = done.path("labels.db"), done.path("rankings")
    prompts = str(write_prompts(folder / "prompts.jsonl"))
    reward, reference = done.path("reward"), done.path("reference")
    base = ["--model", str(model)]
    judge = ["--reward", reward, "--reference", reference, "--precision", "fp32"]
    commands = [
        ["import", prompts, "--db", database],
        ["generate", "--db", database, *base, "-k", "4", *SHORT],
        ["annotate", "--db", database, "--annotator", f"signal:{SIGNAL}"],
        ["export", "--db", database, "--out", rankings],
        ["train-reward", "--rankings", rankings, *base, "--out", reward, "--precision", "fp32"],
        [
            *("reference", "--prompts", rankings, *base, "--out", reference),
            *("--samples", "2", "--reward", reward, *SHORT),
        ],
        done.ppo_arguments(folder / "ppo", "--save-every", "2"),
        [
            *("evaluate", "--policy", done.path("ppo"), *judge),
            *("--gold", SIGNAL, "--out", done.path("evaluate"), "--samples", "2"),
        ],
    ]
    for command in commands:
        assert main(command) == 0, command
    return done
