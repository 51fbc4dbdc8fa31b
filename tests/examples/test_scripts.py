"""Scripts of the examples: the commands of the quickstart, and that every program can start."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.servers.commands import REPOSITORY

RECORDER = '#!/bin/sh\necho "$@" >>"$RECORD"\n'


def commands(folder: Path, script: str, **variables: str) -> list[list[str]]:
    """The words of every `rlhf` command of a script."""
    (folder / "bin").mkdir(exist_ok=True)
    recorder = folder / "bin" / "rlhf"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    record = folder / "record"
    record.write_text("")
    environment = {
        "PATH": f"{recorder.parent}:{os.environ['PATH']}",
        "RECORD": str(record),
        "RUN": str(folder / "run"),
        **variables,
    }
    path = REPOSITORY / "examples" / script
    subprocess.run(["bash", str(path)], cwd=REPOSITORY, env=environment, check=True)
    return [shlex.split(line) for line in record.read_text().splitlines()]


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


LOOP = ["import", "generate", "annotate", "export", "train-reward", "reference", "ppo", "evaluate"]


def test_the_quickstart_is_ranked_by_a_signal_or_by_people(tmp_path: Path) -> None:
    said = commands(tmp_path, "quickstart/run.sh")
    assert [words[0] for words in said] == LOOP
    assert value(said[3], "--kind") == "signal"
    assert value(said[0], "--db") == str(tmp_path / "run" / "labels.db")
    assert value(said[-1], "--gold") == "examples.quickstart.sentiment:score"
    said = commands(tmp_path, "quickstart/run.sh", ANNOTATOR="human", DB="first.db")
    assert [words[0] for words in said] == [name for name in LOOP if name != "annotate"]
    assert value(said[2], "--kind") == "human"
    assert {value(words, "--db") for words in said[:3]} == {"first.db"}
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
