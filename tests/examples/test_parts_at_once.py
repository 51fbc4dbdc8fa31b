"""Parts of an experiment that need nothing of each other run at the same time."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from examples.evidence.commands import at_once, rlhf
from tests.pipeline.loop import write_prompts
from tests.servers.commands import REPOSITORY

LABEL_IN_THE_BACKGROUND = """
import os
import sys
from functools import partial
from pathlib import Path
from examples.evidence import commands

os.cpu_count = lambda: 2

def label(db):
    commands.rlhf("label", "--db", db, "--port", "0")

commands.at_once(*(partial(label, Path(one)) for one in sys.argv[1:]))
"""


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_parts_wait_for_each_other_and_return_in_order(two_cores: None) -> None:
    both = threading.Barrier(2, timeout=60)

    def part(name: str) -> tuple[str, bool]:
        both.wait()  # passes only where two are at work
        return name, threading.current_thread() is threading.main_thread()

    found = at_once(*(partial(part, name) for name in "abcd"))
    assert found == [(name, False) for name in "abcd"]


def test_on_one_core_parts_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert at_once(threading.current_thread, threading.get_ident) == [
        threading.main_thread(),
        threading.get_ident(),
    ]


def test_commands_of_parts_have_processes_of_their_own(two_cores: None, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    databases = [tmp_path / f"{name}.db" for name in "ab"]
    found = at_once(*(partial(rlhf, "import", prompts, "--db", db) for db in databases))
    assert [one["db"] for one in found] == [str(db) for db in databases]


def test_where_one_part_fails_the_others_are_stopped(two_cores: None, tmp_path: Path) -> None:
    began = time.monotonic()
    db = tmp_path / "labels.db"
    with pytest.raises(SystemExit, match="2"):
        at_once(
            partial(rlhf, "label", "--db", db, "--port", "0"),  # would serve for ever
            partial(rlhf, "export", "--db", tmp_path / "missing.db", "--out", tmp_path / "out"),
        )
    assert time.monotonic() - began < 120


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_kill_takes_the_commands_with_it(tmp_path: Path) -> None:
    databases = [str(tmp_path / f"{name}.db") for name in "ab"]
    program = [sys.executable, "-c", LABEL_IN_THE_BACKGROUND, *databases]
    with subprocess.Popen(program, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        while not commands_on(tmp_path):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while left := commands_on(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def commands_on(folder: Path) -> list[str]:
    """The running `rlhf` commands whose words name a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_text().split("\0")
        except OSError:  # it has ended
            continue
        if "rlhf.cli" in words and any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found
