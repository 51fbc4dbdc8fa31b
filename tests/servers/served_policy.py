"""`rlhf serve --policy` in a process of its own, before a small model server."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.servers.commands import Command, free_port, start_process

STARTING_SECONDS = 240


@dataclass(frozen=True)
class PolicyServer:
    """A proxy that is ready."""

    url: str
    process: Command
    openai: OpenAI
    client: httpx.Client

    def ask(self, text: str = "Hi?", **more: Any) -> dict[str, Any]:
        """A completion that is not streamed."""
        body = {"model": "policy", "messages": [{"role": "user", "content": text}], **more}
        return self.post("/v1/chat/completions", body).raise_for_status().json()

    def post(self, path: str, value: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=value, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("rlhf_serve_"): float(value) for name, value in pairs}

    def stop(self) -> tuple[int | None, str, str]:
        """The exit code after SIGTERM, stdout and stderr."""
        self.process.send_signal(signal.SIGTERM)
        out, said = self.process.communicate(timeout=120)
        return self.process.returncode, out, said


@contextmanager
def served_policy(*arguments: str | Path) -> Iterator[PolicyServer]:
    port = free_port()
    process = start_process("serve", *arguments, "--port", port)
    url = f"http://127.0.0.1:{port}"
    client = httpx.Client(base_url=url, timeout=60)
    client_of_openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    server = PolicyServer(url, process, client_of_openai, client)
    deadline = time.monotonic() + STARTING_SECONDS
    try:
        while True:
            try:
                server.get("/health")
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    pytest.fail(f"rlhf serve did not start: {process.communicate()[1]}")
                time.sleep(0.1)
        yield server
    finally:
        client.close()
        client_of_openai.close()
        process.kill()
        process.communicate()
