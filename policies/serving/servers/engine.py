"""The model server behind the proxy as a child process: transformers' own, or vLLM's."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, final

import httpx

from policies.serving.settings import Engine
from rlhf.errors import InputError
from rlhf.ranks import command_ending_with_parent

POLL_SECONDS = 0.2
HEALTH_SECONDS = 5.0
STOP_SECONDS = 20.0
MAX_PAUSE_SECONDS = 60.0
HEALTHY_SECONDS = 60.0  # a server that ran for so long is started again at once
DRAIN_SECONDS = 2.0  # for what a server has said before it ended


def engine_command(
    engine: Engine, folder: str, port: int, template_kwargs: dict[str, Any], flags: Sequence[str]
) -> list[str]:
    """The command line of a model server.

    Args:
        engine: whose server.
        folder: the model.
        port: on this machine.
        template_kwargs: values for the chat template that the model was trained with.
        flags: further flags, as they are.

    Raises:
        InputError: the engine is not installed.
    """
    command = [_program(engine), "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    is_vllm = engine == "vllm"
    command += ["--uvicorn-log-level", "warning"] if is_vllm else ["--log-level", "error"]
    if template_kwargs:
        name = "--default-chat-template-kwargs" if is_vllm else "--chat-template-kwargs"
        command += [name, json.dumps(template_kwargs)]
    return [*command, *flags]


def _program(engine: Engine) -> str:
    beside = Path(sys.executable).with_name(engine)
    program = str(beside) if beside.is_file() else shutil.which(engine)
    if program is None:
        raise InputError(
            f"--engine is {engine}, and there is no program {engine}",
            f"Install it: pip install {engine}, or give the address of a server: --endpoint URL",
        )
    if engine == "transformers" and find_spec("openai") is None:
        raise InputError(
            "`transformers serve` needs the package openai, and it is not installed",
            "Install it: pip install 'openai>=1.98'",
        )
    return program


@final
class EngineProcess:
    """A model server that is started again if it ends.

    Args:
        command: the command line for a port.
    """

    def __init__(self, command: Callable[[int], list[str]]) -> None:
        self.port = _free_port()
        self._command = command(self.port)
        self._pause_seconds = 0.0
        self._start()

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_until_ready(self) -> None:
        """Wait until it has loaded its model, however long that takes.

        Raises:
            InputError: it has ended.
        """
        while not self.is_ready():
            time.sleep(POLL_SECONDS)

    def is_ready(self) -> bool:
        """Whether it has loaded its model.

        Raises:
            InputError: it has ended.
        """
        if self._answers():
            return True
        code = self._process.poll()
        if code is not None:
            self._listener.join(DRAIN_SECONDS)
            raise InputError(
                f"The model server ended with status {code} before it was ready",
                f"Its messages are above. Try it alone: {' '.join(self._command)}",
            )
        return False

    def restart_if_dead(self) -> None:
        """Start it again if it has ended, with growing pauses if it ends soon."""
        code = self._process.poll()
        if code is None:
            return
        now = time.monotonic()
        if now - self._began > HEALTHY_SECONDS:
            self._pause_seconds = 0.0
        if now - self._began < self._pause_seconds:
            return
        self._kill_group()  # its children may hold the GPU
        sys.stderr.write(f"The model server ended with status {code}: starting it again.\n")
        self._pause_seconds = min(2 * self._pause_seconds + 1, MAX_PAUSE_SECONDS)
        self._start()

    def stop(self) -> None:
        """End it, and kill what is left of it, such as the processes that it has started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command_ending_with_parent(self._command),  # nobody could reach it without the proxy
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if "vllm" in self._command[0] else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if "vllm" in self._command[0] else subprocess.PIPE,
            process_group=0,  # a Ctrl-C reaches only the proxy, which ends the group
        )
        output = self._process.stdout or self._process.stderr
        assert output is not None
        self._listener = threading.Thread(target=self._pass_on, args=(output,), daemon=True)
        self._listener.start()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Show on stderr what the server says, but not its address: the proxy's is the one to use.

        Progress bars end their lines with a carriage return.
        """
        inner = f"127.0.0.1:{self.port}"
        with TextIOWrapper(output, encoding="utf-8", errors="replace", newline="") as lines:
            for line in lines:
                if inner not in line:
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def _answers(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/health"
        try:
            return httpx.get(url, timeout=HEALTH_SECONDS, trust_env=False).is_success
        except httpx.HTTPError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
