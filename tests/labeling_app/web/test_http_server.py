"""Connections that do nothing are closed in time, make room for others, and do not fill the log."""

import asyncio
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from labeling_app.web import http_server
from labeling_app.web.http_server import LimitedConfig, LimitedServer, OncePerSecond
from rlhf.endpoints.request_bodies import BodyError, read_body

MAX_CONNECTIONS = 20
HEAD = b"POST /echo HTTP/1.1\r\nHost: label\r\nContent-Length: 9\r\n"
GET = b"GET /%s HTTP/1.1\r\nHost: label\r\n\r\n"


async def echo(request: Request) -> PlainTextResponse:
    try:
        return PlainTextResponse(await read_body(request, 100))
    except BodyError as error:
        return PlainTextResponse(error.problem, status_code=error.status)


async def large(request: Request) -> PlainTextResponse:
    return PlainTextResponse("x" * 20_000_000)


async def stream(request: Request) -> StreamingResponse:
    async def lines():
        for number in range(5):
            yield f"{number}\n"
            await asyncio.sleep(0.5)

    return StreamingResponse(lines())


@pytest.fixture
def server(monkeypatch) -> Iterator[LimitedServer]:
    """A server in a thread, whose times are short."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "READ_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(http_server, name, 1.0)
    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]), Route("/large", large), Route("/stream", stream)
        ]
    )  # fmt: skip
    config = LimitedConfig(app, max_connections=MAX_CONNECTIONS, port=0, log_level="warning")
    server = LimitedServer(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join()


def connect(server: LimitedServer, begin: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    address = server.servers[0].sockets[0].getsockname()
    opened = socket.create_connection(address, timeout=10, source_address=(source, 0))
    opened.sendall(begin)
    return opened


def read_all(opened: socket.socket) -> bytes:
    """What comes until the other side closes."""
    received = b""
    try:
        while chunk := opened.recv(1 << 16):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def drip(opened: socket.socket, text: bytes) -> None:
    """Send a byte now and then for as long as the other side takes them."""
    try:
        for number in range(len(text)):
            opened.sendall(text[number : number + 1])
            time.sleep(0.2)
    except OSError:
        pass


def test_who_lets_the_server_wait_is_cut_off_and_others_are_not(server):
    unread = connect(server, GET % b"large")
    whole = b"POST /echo HTTP/1.1\r\nHost: label\r\nContent-Length: 4\r\n\r\nbody"
    slow = {
        "nothing": connect(server),
        "half a head": connect(server, HEAD),
        "half a body": connect(server, HEAD + b"\r\nhal"),
        "a second half head": connect(server, whole + b"GET / HT"),
        "a head in drips": connect(server),
        "a body in drips": connect(server, HEAD.replace(b"9", b"90") + b"\r\n"),
    }
    watching = connect(server, GET % b"stream")
    dripping = [("a head in drips", HEAD * 3), ("a body in drips", b"x" * 90)]
    for name, text in dripping:
        threading.Thread(target=drip, args=(slow[name], text), daemon=True).start()
    start = time.monotonic()
    answers = {name: read_all(opened) for name, opened in slow.items()}
    assert time.monotonic() - start < 4
    assert answers.pop("a second half head").endswith(b"\r\n\r\nbody")
    assert set(answers.values()) == {b""}
    # An answer that takes its time is no fault of the client.
    assert b"4\n\r\n0\r\n" in read_all(watching)
    assert time.monotonic() - start > 2.2
    assert 0 < len(read_all(unread)) < 20_000_000
    for opened in (*slow.values(), watching, unread):
        opened.close()


def test_half_open_connections_make_room_for_requests(server):
    idle = [connect(server, HEAD) for _ in range(3 * MAX_CONNECTIONS)]
    for _ in range(10):
        with connect(server, HEAD + b"connection: close\r\n\r\nhere I am") as opened:
            assert read_all(opened).endswith(b"here I am")
    assert len(server.server_state.connections) <= MAX_CONNECTIONS
    for opened in idle:
        opened.close()


def test_a_crowd_of_one_address_makes_room_for_others(server):
    with connect(server) as patient:  # connected, and its request is still on the way
        idle = [connect(server, HEAD, source="127.0.0.2") for _ in range(3 * MAX_CONNECTIONS)]
        patient.sendall(HEAD + b"connection: close\r\n\r\nhere I am")
        assert read_all(patient).endswith(b"here I am")
    for opened in idle:
        opened.close()


def test_where_all_are_answering_the_newest_has_to_go(server):
    watching = [connect(server, GET % b"stream") for _ in range(MAX_CONNECTIONS)]
    while len(server.server_state.tasks) < MAX_CONNECTIONS:
        time.sleep(0.01)
    with connect(server) as refused:
        assert read_all(refused) == b""
    for opened in watching:
        opened.close()


def test_a_flood_of_messages_is_one_line_a_second():
    def record(level: int, created: float) -> logging.LogRecord:
        made = logging.LogRecord("uvicorn.error", level, __file__, 1, "bad %s", ("head",), None)
        made.created = created
        return made

    once = OncePerSecond()
    flood = [record(logging.WARNING, 100 + n / 1000) for n in range(2001)]
    written = [made.getMessage() for made in flood if once.filter(made)]
    assert written == [
        "bad head",
        "bad head (999 messages were left out before this)",
        "bad head (999 messages were left out before this)",
    ]
    assert once.filter(record(logging.ERROR, 100.5))  # another level has a line of its own


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(64, 512, 512), (4096, 4096, 4096)])
def test_the_soft_limit_of_files_is_raised(soft, hard, allowed):
    code = "from labeling_app.web.http_server import raise_file_limit; print(raise_file_limit())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    assert int(found.stdout) == allowed


@pytest.mark.parametrize(
    ("trusted", "address"), [(None, "127.0.0.1"), ("127.0.0.1", "10.0.0.7"), ("::1", "127.0.0.1")]
)
def test_an_address_is_believed_from_the_proxies_that_are_named(monkeypatch, trusted, address):
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)

    async def whoami(scope, receive, send) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    config = http_server.configure(whoami)
    config.load()
    client = TestClient(config.loaded_app, client=("127.0.0.1", 50000))
    # What the client says comes first, what the proxy has seen last.
    assert client.get("/", headers={"x-forwarded-for": "10.9.9.9, 10.0.0.7"}).text == address
