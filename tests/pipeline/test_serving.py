"""A policy trained with LoRA, merged, behind `transformers serve`, as policies/README.md says."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.cli import main
from rlhf.tokens import load_tokenizer
from tests.pipeline.loop import Loop

pytestmark = pytest.mark.slow

STARTING_SECONDS = 600
QUESTION = [{"role": "user", "content": "How was the trip?"}]


@pytest.fixture
def served(loop: Loop, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a trained policy and the address that serves it."""
    assert main(loop.ppo_arguments(tmp_path / "ppo", "--lora-rank", "4", steps=1)) == 0
    folder = tmp_path / "ppo" / "policy"
    assert not list(folder.glob("adapter*"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    process = subprocess.Popen(
        [program, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    else:
        process.kill()
        pytest.fail(f"transformers serve did not start: {process.communicate()[0].decode()}")
    yield folder, address
    process.kill()
    process.communicate()


def test_a_policy_folder_answers_over_the_chat_completions_protocol(
    served: tuple[Path, str],
) -> None:
    folder, address = served
    body = {"model": str(folder), "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        said = json.loads(answer.read())["choices"][0]["message"]["content"]
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        whole = model.generate(**ids, do_sample=False, max_new_tokens=8)
    expected = tokenizer.decode(whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said == expected
