"""A function of Python runs where the user has named it, never because a file of a run does."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from rlhf.commands.models import chat
from rlhf.errors import InputError
from rlhf.records.jsonl import write_json


@pytest.fixture
def _fresh_accelerator() -> Iterator[None]:
    """Other tests choose another precision, which accelerate keeps for the whole process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("_fresh_accelerator")
@pytest.mark.parametrize("named", ["signal:evil:score", "http://127.0.0.1:9"])
def test_chat_runs_no_signal_that_stage_json_names(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    (tmp_path / named).mkdir(parents=True)  # a reward model that exists is shown
    shutil.copytree(tiny_model, tmp_path / "ppo" / "policy")
    inputs = {"reward": {"path": named, "hash": "h"}}
    stage = {"stage": "ppo", "status": "done", "inputs": inputs}
    write_json(tmp_path / "ppo" / "stage.json", stage)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = chat.Settings(policy="ppo", reference=str(tiny_model), port=port)
        with pytest.raises(InputError, match="cannot be used"):
            chat.run(settings)
    assert "--reward RM shows rewards, too." in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()
