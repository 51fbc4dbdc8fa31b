"""Two processes work in one folder only where both fill one stage."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf.errors import InputError
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir, open_stage, stage_status
from tests.rlhf.run.stages import INPUTS, Settings, finish, open_ppo


def test_two_jobs_may_begin_at_the_same_moment(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "ppo")
    run.path.mkdir()
    (run.path / ".config.yaml.0123abcd.partial").touch()  # the other one's, in work
    open_ppo(run.path)
    run.stage_file.unlink()  # the other one has not written it yet
    assert open_ppo(run.path, resume=True).read_stage()["status"] == "running"


OPENING = """
import pathlib, sys, time
from rlhf.run.rundir import open_stage
from tests.rlhf.run.stages import INPUTS, Settings
out, *shard = sys.argv[1:]
settings = Settings(out=pathlib.Path(out), shard=shard[0] if shard else None)
open_stage(settings.out, "ppo", settings, INPUTS, resume=False)
"""
HOLDING = """
import pathlib, sys, time
from rlhf.run.rundir import RunDir, stage_status
holding = stage_status(RunDir(pathlib.Path(sys.argv[1])))
holding.__enter__()
"""


@contextmanager
def another_process(program: str, *words: object) -> Iterator[str]:
    """A process that works in a folder until the block ends; gives the message about it."""
    command = [sys.executable, "-c", f"{program}print('ready', flush=True)\ntime.sleep(60)"]
    with subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        yield f"Process {other.pid} on {socket.gethostname()} is working in {words[0]}"
        other.kill()


def test_a_second_process_leaves_the_record_of_the_running_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "ppo")
    with another_process(OPENING, run.path) as message:
        files = (run.config_file, run.stage_file, run.packages_file)
        before = [file.read_bytes() for file in files]
        with pytest.raises(InputError, match=re.escape(message)):
            open_ppo(run.path, resume=True)
        assert [file.read_bytes() for file in files] == before
    finish(open_ppo(run.path, resume=True))
    assert run.is_done


def test_jobs_that_fill_one_stage_all_open_it(tmp_path: Path) -> None:
    with another_process(OPENING, tmp_path / "all", "0/2"):
        another = Settings(out=tmp_path / "all", shard="1/2")
        open_stage(tmp_path / "all", "ppo", another, INPUTS, resume=True)


def test_two_processes_never_work_in_one_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.stage_file, {"stage": "ppo", "status": "running"})
    with another_process(HOLDING, run.path) as message:
        with pytest.raises(InputError, match=re.escape(message)), stage_status(run):
            pass
        assert run.read_stage()["status"] == "running"
        with stage_status(run, alone=False, is_complete=lambda: False):
            pass  # one of many jobs that fill a stage
    with stage_status(run):  # the lock has died with its process
        pass
    assert run.read_stage()["status"] == "done"
