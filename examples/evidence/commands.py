"""`rlhf` commands of the experiments: each remembers what it did, and some run at the same time."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf.cli import main
from rlhf.ranks import command_ending_with_parent
from rlhf.run.rundir import RunDir

Config = dict[str, Any]
Result = TypeVar("Result")

AT_ONCE = 2  # parts

_running: set[subprocess.Popen[str]] = set()
_share = threading.local()  # `cores` of a part that runs beside others


def at_once(*parts: Callable[[], Result]) -> list[Result]:
    """Do parts that need nothing of each other at the same time; return what each returns.

    Two at a time, each on half of the cores: a small model is hardly faster on two cores than on
    one, and PPO holds up to five models. On a GPU one follows the other. Where one fails, the
    others are stopped.
    """
    cores = usable_cores()
    workers = 1 if torch.cuda.is_available() else min(len(parts), cores, AT_ONCE)
    if workers < 2:
        return [part() for part in parts]

    def take_share() -> None:
        _share.cores = cores // workers

    failed = threading.Event()

    def do(part: Callable[[], Result]) -> Result:
        if failed.is_set():
            raise CancelledError
        try:
            return part()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(workers, initializer=take_share) as pool:
        done = [pool.submit(do, part) for part in parts]
        try:
            wait(done, return_when=FIRST_EXCEPTION)
            for future in filter(Future.done, done):  # what failed comes before what did not begin
                future.result()
            return [future.result() for future in done]
        except BaseException:
            failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            stop(done)
            raise


def stop(parts: Sequence[Future[Any]]) -> None:
    """End the commands of parts at work, also those that a part just starts."""
    told: set[subprocess.Popen[str]] = set()
    while not all(future.done() for future in parts):
        for process in set(_running) - told:
            process.terminate()
            told.add(process)
        time.sleep(0.1)


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rlhf(*arguments: str | Path | float) -> Config:
    """Run one command and return its result.

    Raises:
        SystemExit: it failed; its own message is on stderr.
    """
    print("rlhf", *arguments, file=sys.stderr)
    argv = [*map(str, arguments), "--json"]
    cores = getattr(_share, "cores", None)
    code, output = in_here(argv) if cores is None and "--processes" not in argv else beside(argv)
    if code:
        raise SystemExit(code)
    result: Config = json.loads(output.splitlines()[-1])
    return result


def in_here(argv: list[str]) -> tuple[int, str]:
    """Exit status and stdout of a command in this process, which has torch loaded."""
    output = StringIO()
    with redirect_stdout(output):
        return main(argv), output.getvalue()


def beside(argv: list[str]) -> tuple[int, str]:
    """The same of a command in a process of its own.

    It is killed with this one, so that an experiment that goes on later finds its folders free.
    """
    command = [sys.executable, "-m", "rlhf.cli", *argv]
    command = command_ending_with_parent(command, signal.SIGKILL)
    cores = getattr(_share, "cores", None)
    env = None if cores is None else {**os.environ, "OMP_NUM_THREADS": str(cores)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, process_group=0
    ) as process:
        _running.add(process)
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        finally:
            _running.discard(process)
    return process.returncode, output


def stage(out: Path, *arguments: str | Path | float) -> Config:
    """Run a stage, go on with it, or find it done by the same settings; return its whole report."""
    rlhf(*arguments, "--out", out, "--resume")
    return RunDir(out).read_report()


def flags(settings: Config) -> list[str]:
    """Settings of a configuration as flags: {"kl.coefficient": 0.2} → --kl.coefficient 0.2.

    A setting that is true becomes its flag alone.
    """
    named = [("--" + name.replace("_", "-"), value) for name, value in settings.items()]
    return [
        word for name, value in named for word in ((name,) if value is True else (name, str(value)))
    ]
