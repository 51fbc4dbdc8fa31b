"""What `rlhf serve --policy` costs: tokens per second through it and at the server behind it.

32 clients stream chat completions, each one after the other, once through the proxy, which keeps
every response in a database, and once from the server itself: a pair. Pairs alternate which comes
first; the median of their ratios counts. The server is a stub that sends so many tokens per second
in each stream, exactly: the processors that a model would need are free, so the proxy's own cost
shows. `--engine transformers` puts `transformers serve` with continuous batching and a real model
there, which share the processors with the proxy, as in use.

    python examples/benchmarks/serving.py [--quick] [--json]
    python examples/benchmarks/serving.py --engine transformers --model models/SmolLM2-135M-Instruct

`cpu_ms` is the proxy's processor time per token.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
STREAMS = 32
TOKENS_PER_SECOND = 25  # in each stream of the stub
STARTING_SECONDS = 600
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
QUESTION = "Tell me about the sea, the wind and the light in a few sentences. "


@dataclass(frozen=True)
class Load:
    """The requests of each client: so many completions, of so many tokens."""

    rounds: int
    tokens: int


# ------------------------------------------------------------------------------------ the stub


def chunk_of(content: str | None, finish: str | None) -> bytes:
    """An event as `transformers serve` writes it."""
    choice = {"delta": {"content": content} if content else {}, "index": 0, "finish_reason": finish}
    event = {"id": "9f0c2f6e-6a1d-4a55", "choices": [choice], "created": 1, "model": "stub"}
    line = {**event, "object": "chat.completion.chunk", "system_fingerprint": ""}
    return b"data: " + json.dumps(line, separators=(",", ":")).encode() + b"\n\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stream so many tokens as are asked for, each at its time; or list the model."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        body = b'{"data": [{"id": "stub"}]}'
        length = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(length.encode() + body)
    else:
        [length] = [ln for ln in head.lower().split(b"\r\n") if ln.startswith(b"content-length")]
        request = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
        writer.write(HEAD)
        token, began = chunk_of(" token", None), time.monotonic()
        for number in range(1, request["max_tokens"] + 1):
            due = began + number / TOKENS_PER_SECOND - time.monotonic()
            if due > 0:
                await asyncio.sleep(due)
            writer.write(token)
            await writer.drain()
        writer.write(chunk_of(None, "length"))
    await writer.drain()
    writer.close()


async def serve_stub(port: int) -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=256)
    await server.serve_forever()


# --------------------------------------------------------------------------------- the clients


async def stream_once(port: int, model: str, index: int, tokens: int) -> tuple[int, float]:
    """One completion: the tokens that arrived, and the seconds until the first."""
    messages = [{"role": "user", "content": f"{QUESTION} {index}"}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
    content = json.dumps({**body, "temperature": 1.0}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    count, first, rest = 0, 0.0, b""
    while piece := await reader.read(2**16):
        rest += piece
        arrived = rest.count(b'"content":"')
        if arrived and not count:
            first = time.perf_counter() - began
        count += arrived
        rest = rest[-10:] if arrived else rest[-400:]
    writer.close()
    return count, first


async def load_server(port: int, model: str, load: Load) -> dict[str, float]:
    """All clients at once: tokens per second and the median wait for a first token."""

    async def one_client(client: int) -> list[tuple[int, float]]:
        return [
            await stream_once(port, model, 1000 * number + client, load.tokens)
            for number in range(load.rounds)
        ]

    began = time.perf_counter()
    completions = [
        completion
        for many in await asyncio.gather(*map(one_client, range(STREAMS)))
        for completion in many
    ]
    seconds = time.perf_counter() - began
    tokens = sum(count for count, _ in completions)
    first = statistics.median(wait for _, wait in completions)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "first_ms": 1000 * first}


# --------------------------------------------------------------------------------- the servers


@contextmanager
def running(command: list[str], port: int, path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that answers at `path`."""
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=settings) as process:
        try:
            deadline = time.monotonic() + STARTING_SECONDS
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                        break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{command} does not answer") from None
                    time.sleep(0.2)
            yield process
        finally:
            process.terminate()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """User and system time of a process so far, of all threads."""
    stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure_pairs(command: list[str], port: int, model: str, load: Load, pairs: int) -> list[Any]:
    """Direct and through the proxy, in turn.

    Args:
        command: the command line of the server behind.
        port: where it serves.
        model: its name there.
        load: what the clients ask.
        pairs: how many.
    """
    proxy_port = free_port()
    with tempfile.TemporaryDirectory() as folder, running(command, port, "/health"):
        db = Path(folder) / "labels.db"
        proxied = [sys.executable, "-m", "rlhf.cli", "serve", "--db", str(db), "--policy", model]
        proxied += ["--endpoint", f"http://127.0.0.1:{port}/v1", "--port", str(proxy_port)]
        runs = []
        with running(proxied, proxy_port, "/health") as proxy:
            asyncio.run(load_server(port, model, Load(1, 4)))  # compiles and allocates
            for number in range(pairs):
                run: dict[str, Any] = {}
                for through in (False, True) if number % 2 else (True, False):
                    before = cpu_seconds(proxy)
                    target = (proxy_port, "policy") if through else (port, model)
                    metrics = asyncio.run(load_server(*target, load))
                    if through:
                        metrics["cpu_ms"] = 1000 * (cpu_seconds(proxy) - before) / metrics["tokens"]
                    run["proxy" if through else "direct"] = metrics
                run["ratio"] = (
                    run["proxy"]["tokens_per_second"] / run["direct"]["tokens_per_second"]
                )
                runs.append(run)
                sys.stderr.write(f"{json.dumps(run)}\n")
        require_kept(db, pairs * load.rounds * STREAMS)
    return runs


def require_kept(db: Path, expected: int) -> None:
    """Check that the proxy has kept every response: it would be fast otherwise."""
    from sqlite_utils import Database

    count = Database(db).execute("SELECT COUNT(*) FROM served").fetchone()[0]
    if count != expected:
        raise RuntimeError(f"{count} of {expected} responses were kept")


def summary(runs: list[Any]) -> dict[str, float]:
    """Medians over pairs."""
    medians = {"ratio": statistics.median(run["ratio"] for run in runs), "pairs": len(runs)}
    for side, name in (
        *(("direct", "tokens_per_second"), ("proxy", "tokens_per_second")),
        *(("direct", "first_ms"), ("proxy", "first_ms"), ("proxy", "cpu_ms")),
    ):
        medians[f"{side}_{name}"] = statistics.median(run[side][name] for run in runs)
    return medians


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs and tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--engine", choices=("stub", "transformers"), default="stub")
    parser.add_argument("--model", help="of --engine transformers: its folder")
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub:
        asyncio.run(serve_stub(arguments.stub))
        return
    pairs = 3 if arguments.quick else 9
    load = Load(rounds=1, tokens=100) if arguments.quick else Load(rounds=2, tokens=150)
    port, engine, model = free_port(), arguments.engine, "stub"
    command = [sys.executable, __file__, "--stub", str(port)]
    if engine == "transformers":
        if arguments.model is None:
            parser.error("--engine transformers needs a model: --model FOLDER")
        model, load = arguments.model, Load(rounds=1, tokens=16 if arguments.quick else 64)
        command = [str(Path(sys.executable).with_name("transformers")), "serve", model]
        command += ["--port", str(port), "--log-level", "error", "--continuous-batching"]
    runs = {engine: measure_pairs(command, port, model, load, pairs)}
    summaries = {case: summary(of_case) for case, of_case in runs.items()}
    for case, values in summaries.items():
        print(case, *(f"{name}={value:.4g}" for name, value in values.items()))
    if arguments.json:
        names = ("starlette", "uvicorn", "httpx", *(["transformers"] if model != "stub" else []))
        versions = {name: version(name) for name in names}
        print(
            json.dumps(
                {"ratio": summaries[engine]["ratio"], "runs": summaries, "versions": versions}
            )
        )


if __name__ == "__main__":
    main()
