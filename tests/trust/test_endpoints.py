"""Endpoints that drip, redirect, never end or answer nonsense, over real sockets."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from labeling_app.annotators.judges import annotate_with_judge
from labeling_app.db.store import Store
from labeling_app.web.live.endpoint_model import EndpointModel, served_model
from reward.scoring import texts as text_scoring
from rlhf.endpoints import judge, urls
from rlhf.errors import InputError, InterruptedRunError
from rlhf.records.schema import Message, Prompt, Response, Sampling
from tests.servers.local import LocalServer

PROMPT = Prompt.create((Message(role="user", content="Hi?"),), "train", "test")
QUESTION = judge.build_request("Which?", "one", "two", rubric="")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
QUICK = {"timeout_seconds": 0.08, "first_pause_seconds": 0.01}


@contextmanager
def dripping(first: bytes, rest: bytes = b"x" * 500) -> Iterator[str]:
    """The address of a server that says `first`, then a byte every 20 ms, for ten seconds."""
    ended = threading.Event()

    def serve(client: socket.socket) -> None:
        with client:
            try:
                client.recv(65536)
                client.sendall(first)
                for byte in rest:
                    if ended.wait(0.02):
                        return
                    client.sendall(bytes([byte]))
            except OSError:
                pass  # the client has gone

    def accept(listener: socket.socket) -> None:
        while not ended.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


DRIPS = [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", HEAD]
FAILURES = [b"HTTP/1.1 503 Busy\r\n\r\n", b"HTTP/1.1 401 No\r\nContent-Length: 5000\r\n\r\n"]


def ask_judge(url: str) -> str:
    return judge.complete(judge.Endpoint(url=url, model="m", **QUICK), QUESTION)


def ask_reward(url: str) -> list[list[float]]:
    score = text_scoring.load_text_reward(url, Accelerator(cpu=True), tokens_per_batch=1)
    return score([(PROMPT, (Response(id="a", prompt_id=PROMPT.id, text="Yes", model=""),))])


def ask_live(url: str) -> list[Response]:
    voice = EndpointModel(url=url, model="m", sampling=Sampling(), timeout_seconds=0.2)
    return voice.answer(PROMPT, ["a"], 0, lambda row, text: True)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_scoring, "TIMEOUT_SECONDS", 0.08)
    monkeypatch.setattr("labeling_app.web.live.endpoint_model.TOTAL_TIME", 2)
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)


@pytest.mark.parametrize("first", [*DRIPS, *FAILURES])
@pytest.mark.parametrize("ask", [ask_judge, ask_reward])
def test_a_server_that_drips_is_given_up(ask: Callable[[str], Any], first: bytes) -> None:
    began = time.monotonic()
    with dripping(first) as url, pytest.raises(InterruptedRunError) as caught:
        ask(url)
    assert time.monotonic() - began < 5
    assert caught.value.exit_code == 75
    assert "(no whole answer within 0." in caught.value.problem


@pytest.mark.parametrize("first", [*DRIPS, HEAD + b'data: {"choices": []}\n\ndata: '])
def test_live_mode_gives_up_a_server_that_drips(first: bytes) -> None:
    began = time.monotonic()
    with dripping(first) as url, pytest.raises(InputError, match=r"took more than 0\.4 seconds"):
        ask_live(url)
    assert time.monotonic() - began < 5


@pytest.fixture
def _default_sigint() -> Iterator[None]:
    """PyTorch's agent, where an earlier test started one, leaves a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_sigint")
def test_ctrl_c_ends_what_a_judge_is_asked(tmp_path: Path) -> None:
    responses = [Response(id=x, prompt_id=PROMPT.id, text=x, model="m") for x in "abc"]
    endpoint = judge.Endpoint(model="m", timeout_seconds=60, url="")
    with dripping(HEAD) as url, Store(tmp_path / "labels.db") as store:
        store.add_prompts([PROMPT])
        store.add_responses(responses)
        main = threading.main_thread().ident
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            annotate_with_judge(
                store, judge.replace(endpoint, url=url), name="j", rubric="", parallel=2
            )
    assert time.monotonic() - began < 4


class Pointing(LocalServer):
    """Points every request to another address, with a status of choice."""

    def __init__(self, status: int, target: str) -> None:
        super().__init__(PointingHandler)
        self.status, self.target = status, target


class PointingHandler(BaseHTTPRequestHandler):
    server: Pointing

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.server.status)
        self.send_header("Location", self.server.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


class Hearing(LocalServer):
    """Keeps every request that comes."""

    def __init__(self) -> None:
        super().__init__(HearingHandler)
        self.heard: list[str | None] = []


class HearingHandler(BaseHTTPRequestHandler):
    server: Hearing

    def do_POST(self) -> None:
        self.server.heard.append(self.headers["Authorization"])
        self.send_error(500)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("ask", [ask_judge, ask_reward, ask_live, served_model])
def test_a_key_stays_with_the_address_it_was_given_for(
    ask: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RLHF_JUDGE_API_KEY", "RLHF_LIVE_API_KEY"):
        monkeypatch.setenv(name, "secret")
    with Hearing() as other, Pointing(301, f"{other.url}elsewhere") as server:
        for server.status in (301, 302, 303, 307, 308):
            with pytest.raises(InputError) as caught:
                ask(server.url)
            assert other.heard == []
            problem = caught.value.problem
            assert str(server.status) in problem
            if ask in (ask_judge, ask_reward):
                assert f"it redirects to {other.url}elsewhere, which is not followed" in problem


def test_an_answer_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "MAX_ANSWER_BYTES", 1000)
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b"[" * 5000
    for ask in (ask_judge, ask_reward):
        with dripping(whole, b"") as url, pytest.raises(InterruptedRunError, match="1,000 bytes"):
            ask(url)


def test_a_stream_in_one_endless_line_is_no_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labeling_app.web.live.endpoint_model.MAX_LINE", 1000)
    stream = HEAD + b"data: " + b"1" * 5000
    with dripping(stream, b"") as url, pytest.raises(InputError, match="does not speak"):
        ask_live(url)
