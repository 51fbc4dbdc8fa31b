"""The model server as a child process: waited for, started again, ended with the proxy."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from policies.serving.servers.engine import EngineProcess, engine_command
from rlhf.errors import InputError
from rlhf.modeling.tokens import load_tokenizer
from tests.conftest import build_tiny_model
from tests.servers.processes import HEALTHY, children_of, is_alive
from tests.servers.served_policy import served_policy
from tests.servers.waiting import wait_until

HI = [{"role": "user", "content": "How was the trip?"}]
FOREIGN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listening:
    while True:
        with listening.accept()[0] as client:
            client.sendall(b"SSH-2.0\\r\\n")
"""
WITH_A_CHILD = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(sys.argv[1]).write_text(f"{child.pid}\\n")
child.wait()
"""
STARTING = """
import sys, time
from policies.serving.servers.engine import EngineProcess
engine = EngineProcess(lambda port: [sys.executable, "-c", sys.argv[1], str(port)])
engine.wait_until_ready()
print(engine._process.pid, flush=True)
time.sleep(60)
"""


def test_a_server_that_dies_is_started_again_and_at_last_ended(capsys):
    engine = EngineProcess(lambda port: [sys.executable, "-c", HEALTHY, str(port)])
    try:
        engine.wait_until_ready()
        engine.restart_if_dead()
        first = engine._process
        first.kill()
        first.wait()
        engine.restart_if_dead()
        assert engine._process is not first
        engine.wait_until_ready()
        said = "The model server ended with status -9: starting it again.\n"
        assert capsys.readouterr().err == said
    finally:
        engine.stop()
    assert engine._process.returncode == -signal.SIGTERM


def test_pauses_between_starts_grow_until_a_server_has_run_for_a_minute(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("policies.serving.servers.engine.time", clock)
    engine = EngineProcess(lambda port: ["false"])

    def pause() -> float:
        began, process = clock.now, engine._process
        process.wait()
        engine.restart_if_dead()
        while engine._process is process:
            clock.now += 0.5
            engine.restart_if_dead()
        return clock.now - began

    assert [pause() for _ in range(8)] == [0, 1, 3, 7, 15, 31, 60, 60]
    clock.now += 60.5
    assert [pause() for _ in range(3)] == [0, 1, 3]
    engine.stop()


def test_a_server_that_cannot_start_is_an_error():
    engine = EngineProcess(lambda port: [sys.executable, "-c", "raise SystemExit(4)"])
    with pytest.raises(InputError, match="ended with status 4 before it was ready") as caught:
        engine.wait_until_ready()
    assert "Try it alone: " in caught.value.remedy


def test_a_proxy_of_the_environment_is_not_asked_for_a_server_here(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    engine = EngineProcess(lambda port: [sys.executable, "-c", HEALTHY, str(port)])
    try:
        wait_until(engine._answers, 20)
    finally:
        engine.stop()


def test_what_speaks_another_protocol_is_not_ready():
    engine = EngineProcess(lambda port: [sys.executable, "-c", FOREIGN, str(port)])
    try:
        wait_until(lambda: _connects(engine.port), 20)
        assert not engine._answers()
    finally:
        engine.stop()


def _connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("end", ["stop", "restart_if_dead"])
def test_no_process_of_a_server_outlives_it(tmp_path, end):
    file = tmp_path / "pid"
    words = [sys.executable, "-c", WITH_A_CHILD, str(file)]
    engine = EngineProcess(lambda port: words)
    try:
        wait_until(lambda: file.is_file() and file.read_text().endswith("\n"), 20)
        child = int(file.read_text())
        assert is_alive(child)
        if end == "restart_if_dead":
            engine._process.kill()
            engine._process.wait()
        getattr(engine, end)()
        wait_until(lambda: not is_alive(child), 10)
    finally:
        engine.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells children only there")
def test_a_server_ends_with_the_proxy_that_was_killed():
    command = [sys.executable, "-c", STARTING, HEALTHY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_until(lambda: not is_alive(child), 10)


@pytest.mark.slow
def test_two_policies_behind_transformers_own_server(tiny_model: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=5)
    db = tmp_path / "labels.db"
    with served_policy("--policy", tiny_model, "--against", other, "--db", db) as proxy:
        ids, letter = set(), load_tokenizer(str(tiny_model)).encode("a")[0]
        only_letters = {str(letter): 100.0}  # or this model says nothing but newlines
        for _ in range(12):
            asked = {"model": "policy", "messages": HI, "max_tokens": 8, "logit_bias": only_letters}
            events = list(proxy.openai.chat.completions.create(**asked, stream=True))
            said = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
            assert said == "a" * 8
            ids |= {event.id for event in events}
        assert len(ids) == 12
        metrics = proxy.metrics()
        for name, total in (("requests_total", 12), ("tokens_total", 12 * 8)):
            counts = [metrics[f'{name}{{policy="{side}"}}'] for side in ("policy", "against")]
            assert min(counts) > 0
            assert sum(counts) == total
        assert proxy.post("/feedback", {"id": ids.pop(), "thumbs": "up"}).status_code == 201
        found = proxy.get("/comparison").json()
        assert found["policy"]["name"].startswith(f"{tiny_model} (")
        assert found["policy"]["up"] + found["against"]["up"] == 1
        first, second = children_of(proxy.process.pid)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: proxy.get("/health").status_code == 503)
        wait_until(lambda: proxy.get("/health").status_code == 200, 240)
        assert proxy.openai.chat.completions.create(**asked).choices[0].message.content == "a" * 8
        proxy.process.kill()
        wait_until(lambda: not is_alive(second))
        with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
            proxy.openai.models.list()


def test_a_server_whose_package_is_missing_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("policies.serving.servers.engine.find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        engine_command("transformers", "folder", 8000, {}, ())
    assert "needs the package openai" in caught.value.problem
    assert caught.value.remedy == "Install it: pip install 'openai>=1.98'"


SPEAKS = """
import sys
print("Loading weights:  50 %", end="\\r", file=sys.stderr)
print("INFO:     Uvicorn running on http://127.0.0.1:" + sys.argv[1], file=sys.stderr)
print("Server on http://127.0.0.1:" + sys.argv[1] + " is ready", file=sys.stderr)
print("WARNING: the template is old", file=sys.stderr)
raise SystemExit(3)
"""


def test_what_the_server_says_is_shown_without_its_inner_address(capsys):
    engine = EngineProcess(lambda port: [sys.executable, "-c", SPEAKS, str(port)])
    with pytest.raises(InputError, match="ended with status 3 before it was ready"):
        engine.wait_until_ready()
    assert capsys.readouterr().err == "Loading weights:  50 %\rWARNING: the template is old\n"
    engine.stop()
