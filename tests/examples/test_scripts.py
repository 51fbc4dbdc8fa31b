"""The quickstart is one round of the loop, and every program of the examples can start."""

import shlex
import subprocess
import sys

import pytest

from rlhf.cli import main
from tests.servers.commands import REPOSITORY

LOOP = ["import", "generate", "annotate", "export", "train-reward", "reference", "ppo", "evaluate"]


def commands(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The words of every command of the first round."""
    assert main(["loop", *words, "--dry-run"]) == 0
    first = capsys.readouterr().out.partition("Round 0:")[2].partition("Round 1")[0]
    lines = [line.removeprefix("#").strip() for line in first.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("rlhf ")]


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_quickstart_is_ranked_by_a_signal_or_by_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    people = ("--config", "examples/quickstart/loop.yaml")
    signal = ("--config", "examples/quickstart/signal.yaml")
    said = commands(capsys, *people, *signal, "--seed", "1")
    assert [words[0] for words in said] == LOOP
    assert value(said[3], "--kind") == "signal"
    assert value(said[0], "--db") == "runs/demo/labels.db"
    assert value(said[-1], "--gold") == "signal:examples.quickstart.sentiment:score"
    assert value(said[-1], "--out") == "runs/demo/round-0/evaluate"
    assert [words[0] for words in said if "--seed" in words] == [LOOP[1], *LOOP[4:]]
    said = commands(capsys, *people, "--out", "runs/human", "--db", "runs/demo/labels.db")
    assert [words[0] for words in said] == [name for name in LOOP if name != "annotate"]
    assert value(said[2], "--kind") == "human"
    assert {value(words, "--db") for words in said[:3]} == {"runs/demo/labels.db"}
    assert value(said[-1], "--out") == "runs/human/round-0/evaluate"
    assert "--gold" not in said[-1]


def test_every_program_of_the_examples_can_be_imported() -> None:
    files = sorted((REPOSITORY / "examples").rglob("*.py"))
    # with a trl that still had PPO, in an environment of its own
    programs = [file for file in files if file.name != "ppo_trl.py"]
    modules = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in programs]
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
