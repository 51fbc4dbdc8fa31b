import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf.cluster import ClusterSettings
from rlhf.errors import ConfigError, GuardError, InterruptedRunError
from rlhf.notify import notify
from rlhf.rundir import RunDir, stage_status


class Listener(BaseHTTPRequestHandler):
    heard: list[dict[str, Any]]

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.heard.append(json.loads(content))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    heard: list[dict[str, Any]] = []
    handler = type("Handler", (Listener,), {"heard": heard})
    with HTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/hook", heard
        listening.shutdown()
        thread.join()


def test_a_stage_tells_how_it_ended(server, tmp_path: Path) -> None:
    url, heard = server
    run = RunDir(tmp_path)
    with stage_status(run, url):
        pass
    with pytest.raises(GuardError), stage_status(run, url):
        raise GuardError("Loss is not a number", "Lower the learning rate.")
    with pytest.raises(InterruptedRunError), stage_status(run, url):
        raise InterruptedRunError("Stopped", "Resume.")
    assert [message["status"] for message in heard] == ["done", "failed", "interrupted"]
    assert heard[0] == {"text": f"{tmp_path}: done", "run": str(tmp_path), "status": "done"}
    assert heard[1]["text"] == (
        f"{tmp_path}: failed\nGuardError: Loss is not a number\n  Lower the learning rate."
    )


def test_other_processes_are_silent(server, tmp_path: Path, monkeypatch) -> None:
    url, heard = server
    monkeypatch.setenv("RANK", "1")
    with stage_status(RunDir(tmp_path), url):
        pass
    assert heard == []


def test_a_url_that_does_not_answer_changes_nothing(capsys) -> None:
    notify("http://127.0.0.1:9/hook", "runs/a/ppo", "done")
    shown = capsys.readouterr().err
    assert "--notify: 127.0.0.1 does not answer (" in shown
    assert "hook" not in shown  # who knows the path can write to the chat
    notify("", "runs/a/ppo", "done")


def test_a_url_must_be_one() -> None:
    with pytest.raises(ConfigError, match="--notify is 'slack'\n  Give a URL that starts with ht"):
        ClusterSettings(notify="slack")
