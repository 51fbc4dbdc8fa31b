"""`rlhf chat` reports where votes are stored and which rewards it shows, before it serves."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

from rlhf.records.jsonl import write_json


def test_votes_go_to_chat_db_and_a_reward_model_that_is_gone_is_left_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "ppo" / "policy")
    inputs = {"reward": {"path": "reward/model", "hash": "h"}}
    stage = {"stage": "ppo", "status": "done", "inputs": inputs}
    write_json(tmp_path / "ppo" / "stage.json", stage)
    command = [sys.executable, "-m", "rlhf.cli", "chat", "--annotator", "ann", "--policy", "ppo"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = subprocess.run(
            [*command, "--reference", str(tiny_model), "--port", port],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert "Thumbs and picks are kept in chat.db; --reward RM shows rewards, too." in done.stderr
    assert f"Port {port} of 127.0.0.1 cannot be used" in done.stderr
    assert done.returncode == 2
    assert (tmp_path / "chat.db").is_file()
