from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.errors import ConfigError, GuardError, InterruptedRunError
from rlhf.parallel.settings import ClusterSettings
from rlhf.run.rundir import RunDir, stage_status
from rlhf.run.telemetry.notify import notify
from tests.servers.listener import Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as listening:
        yield listening


def test_a_stage_posts_how_it_ended(listener: Listener, tmp_path: Path) -> None:
    url, received = listener.url, listener.heard
    for name in "abc":
        (tmp_path / name).mkdir()
    with stage_status(RunDir(tmp_path / "a"), url):
        pass
    with pytest.raises(GuardError), stage_status(RunDir(tmp_path / "b"), url):
        raise GuardError("Loss is not a number", "Lower the learning rate.")
    with pytest.raises(InterruptedRunError), stage_status(RunDir(tmp_path / "c"), url):
        raise InterruptedRunError("Stopped", "Resume.")
    assert [message["status"] for message in received] == ["done", "failed", "interrupted"]
    done = str(tmp_path / "a")
    assert received[0] == {"text": f"{done}: done", "run": done, "status": "done"}
    assert received[1]["text"] == (
        f"{tmp_path / 'b'}: failed\nGuardError: Loss is not a number\n  Lower the learning rate."
    )


def test_other_processes_are_silent(listener: Listener, tmp_path: Path, monkeypatch) -> None:
    url, received = listener.url, listener.heard
    monkeypatch.setenv("RANK", "1")
    with stage_status(RunDir(tmp_path), url):
        pass
    assert received == []


def test_a_url_that_does_not_answer_changes_nothing(capsys) -> None:
    notify("http://127.0.0.1:9/hook", "runs/a/ppo", "done")
    shown = capsys.readouterr().err
    assert "--notify: 127.0.0.1 does not answer (" in shown
    assert "hook" not in shown  # who knows the path can write to the chat
    notify("", "runs/a/ppo", "done")


def test_a_url_must_be_one() -> None:
    with pytest.raises(ConfigError, match="--notify is 'slack'\n  Give a URL that starts with ht"):
        ClusterSettings(notify="slack")
