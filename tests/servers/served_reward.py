"""`rlhf serve --reward` in a process of its own, for the length of a test."""

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from tests.servers.commands import Command, free_port, start_process

STARTING_SECONDS = 120


@dataclass(frozen=True)
class ServedReward:
    """A server that is ready."""

    url: str
    process: Command

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        try:
            with urllib.request.urlopen(self.url, body, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name.removeprefix("rlhf_reward_"): float(n) for name, n in map(str.split, lines)}

    def stop(self) -> tuple[int | None, str]:
        """The exit code after SIGTERM, and stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


@contextmanager
def served_reward(reward: Path, *more: str) -> Iterator[ServedReward]:
    port = free_port()
    words = ("serve", "--reward", reward, "--port", port, "--precision", "fp32", *more)
    process = start_process(*words)
    server = ServedReward(f"http://127.0.0.1:{port}", process)
    deadline = time.monotonic() + STARTING_SECONDS
    try:
        while True:
            try:
                server.get("/health")
                break
            except (URLError, ConnectionError, TimeoutError):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    pytest.fail(f"rlhf serve did not start: {process.communicate()[1]}")
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.communicate()
