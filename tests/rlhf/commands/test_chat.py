"""`rlhf chat` reports where votes are stored and which rewards it shows, before it serves."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

from rlhf.commands.models.chat import _trained_with
from rlhf.modeling.models import policy_folder
from rlhf.records.jsonl import write_json
from rlhf.run.loops.promotion import promote
from tests.rlhf.run.loops.folders import make_loop, make_round


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


def test_the_reward_model_of_a_promoted_policy_is_that_of_its_round(tmp_path: Path) -> None:
    out = make_loop(tmp_path / "loop", "m")
    folder = make_round(out, 0)
    reward = {"reward": {"path": str(folder / "reward"), "hash": "h"}}
    write_json(folder / "reward" / "config.json", {})
    write_json(folder / "ppo" / "stage.json", {"stage": "ppo", "status": "done", "inputs": reward})
    (folder / "ppo" / "policy").mkdir()
    promote(out, 0, "lea")
    assert _trained_with(policy_folder(str(out))) == str(folder / "reward")
    assert _trained_with(policy_folder(str(folder / "ppo"))) == str(folder / "reward")
