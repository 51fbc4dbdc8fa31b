"""Commands in processes of their own, which need not import torch and transformers again.

A fork server, one for each test worker, has imported them; every command is a fork of it. Apart
from that it is a process like any other: with its own arguments, environment and output, and killed
like any other. What is about starting itself (`--processes`, torchrun, accelerate) is tested with
new interpreters.
"""

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from rlhf.ranks import exit_process

REPOSITORY = Path(__file__).parents[2]
RLHF = ("-m", "rlhf.cli")
STREAMS = ("stdout", "stderr")
SECONDS = 600.0  # a command that takes longer hangs
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "policies.dpo.train",
        "policies.evaluate.compare",
        "policies.ppo.train",
        "policies.reference.build",
        "policies.sft.train",
        "reward.training.train",
        "torch.distributed.fsdp",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "tests.servers.warm_up",
    ]
)


@cache
def _outputs() -> Path:
    """A folder for what commands write, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    atexit.register(_clean, folder)
    return folder


def _clean(folder: Path) -> None:
    """Kill what a failed test has left, which Python would wait for."""
    for process in multiprocessing.active_children():
        process.kill()
    shutil.rmtree(folder)


class Command:
    """A running Python program, used like a `subprocess.Popen`.

    Args:
        words: as after `python`: a file, or -m and a module, and arguments.
        environment: variables to change.
        folder: where it runs.
    """

    def __init__(
        self, *words: str, environment: Mapping[str, str] | None = None, folder: Path = REPOSITORY
    ) -> None:
        self.args = words
        self._output = Path(tempfile.mkdtemp(dir=_outputs()))
        for name in STREAMS:
            (self._output / name).touch()
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables |= environment or {}
        self._process = FORKS.Process(target=_run, args=(words, variables, folder, self._output))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative after a signal, None while the program runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, None while the program runs."""
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        """Wait until the program has ended: its exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """Wait until the program has ended: what it has written on stdout and stderr."""
        self.wait(timeout)
        out, errors = (self._output / name for name in STREAMS)
        return out.read_text(), errors.read_text()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # just ended: its exit code is still on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(words: tuple[str, ...], environment: dict[str, str], folder: Path, output: Path) -> None:
    """In the new process: become the program."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_APPEND), stream)
    sys.path.insert(0, str(folder))
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)


def start_process(*arguments: object) -> Command:
    """Start an `rlhf` command."""
    return Command(*RLHF, *map(str, arguments))


def run_process(*arguments: object, processes: int = 1) -> "subprocess.CompletedProcess[str]":
    """Run an `rlhf` command until it ends, or in a group of processes: see `finish_group`."""
    return run_group(processes, *RLHF, *arguments)


def run_program(
    *words: object,
    environment: Mapping[str, str] | None = None,
    folder: Path = REPOSITORY,
) -> "subprocess.CompletedProcess[str]":
    """Run a Python program until it ends; a `Command` takes the same."""
    command = Command(*map(str, words), environment=environment, folder=folder)
    out, errors = command.communicate()
    assert command.returncode is not None
    return subprocess.CompletedProcess(command.args, command.returncode, out, errors)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_group(
    processes: int, *words: object, environment: Mapping[str, str] | None = None
) -> list[Command]:
    """Start a Python program in a group of processes, with the variables that torchrun sets.

    One process has none of them.
    """
    if processes == 1:
        return [Command(*map(str, words), environment=environment)]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return [
        Command(
            *map(str, words),
            environment={
                **common,
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **(environment or {}),
            },
        )
        for rank in range(processes)
    ]


def run_group(
    processes: int, *words: object, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a Python program in a group of processes: what `finish_group` returns."""
    return finish_group(start_group(processes, *words, environment=environment))


def finish_group(group: list[Command]) -> "subprocess.CompletedProcess[str]":
    """Wait until all processes of a group have ended; kill the others when one has failed.

    It has the output of the main process, the errors of all, and the first exit code that is not 0.
    """
    limit = time.monotonic() + SECONDS
    while any(one.poll() is None for one in group) and time.monotonic() < limit:
        if any(one.poll() for one in group):
            time.sleep(2)  # time to fail, too
            for one in group:
                one.kill()
        time.sleep(0.005)
    said = [one.communicate() for one in group]
    code = next((one.returncode for one in group if one.returncode), 0)
    errors = "".join(errors for _, errors in said)
    return subprocess.CompletedProcess(group[0].args, code, said[0][0], errors)
