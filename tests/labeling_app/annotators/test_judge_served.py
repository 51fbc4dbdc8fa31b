"""The judge against a server that is not ours: `transformers serve` with SmolLM2."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest

from rlhf.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture
def served(real_model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a chat completions server with the model loaded."""
    pytest.importorskip("openai", reason="transformers serve needs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    command = [program, "serve", str(real_model), "--port", str(port), "--device", "cpu"]
    log = tmp_path / "serve.log"
    with (
        log.open("w") as stream,
        subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        ) as process,
    ):
        for _ in range(900):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (URLError, ConnectionError, TimeoutError):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
        process.kill()


def test_a_real_model_judges_and_every_word_is_kept(
    served, real_model, store, make_prompt, make_responses, capsys
):
    prompt = make_prompt("What is the capital of France?")
    store.add_prompts([prompt])
    store.add_responses(make_responses(prompt, ["Paris.", "I do not like questions."]))
    arguments = ["annotate", "--db", str(store.connections.path), "--annotator", "judge"]
    arguments += ["--endpoint", served, "--model", str(real_model), "--parallel", "1", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["ranked"]) == ("ai", 1)
    calls = list(store.connections.db.query("SELECT * FROM judge_calls"))
    assert len(calls) == 2  # both orders
    assert all(len(call["answer"].split()) > 1 for call in calls)
    verdicts = {call["verdict"] for call in calls}
    assert verdicts <= {"first", "second", "tie", "unclear"}
    # A model this small may well give no verdict; then there is no ranking, and it is said.
    [record] = store.ranked_prompts(kinds=["ai"])
    assert len(record.rankings) == 1 - result["unclear_pairs"]
    assert result["unclear_pairs"] == ("unclear" in verdicts)
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["ranked_before"] == 1
