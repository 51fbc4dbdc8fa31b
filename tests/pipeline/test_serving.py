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
from rlhf.endpoints import judge
from rlhf.modeling.tokens import load_tokenizer
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import Loop

STARTING_SECONDS = 600
QUESTION = [{"role": "user", "content": "How was the trip?"}]


@pytest.fixture(scope="module")
def served(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of a trained policy and the address that serves it."""
    out = tmp_path_factory.mktemp("served") / "ppo"
    assert main(loop.ppo_arguments(out, "--lora-rank", "4", steps=1)) == 0
    folder = out / "policy"
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


def test_a_served_model_judges_an_evaluation(
    served: tuple[Path, str], loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one knows too little to prefer any answer; so the report has no win rate by it."""
    monkeypatch.setattr(judge, "MAX_TOKENS", 32)  # it would write on until there are 512
    folder, address = served
    out = tmp_path / "evaluate"
    asks = ["--judge-endpoint", f"{address}/v1", "--judge-model", str(folder)]
    command = ["evaluate", "--policy", str(folder), "--reward", loop.path("reward")]
    command += ["--reference", loop.path("reference"), "--out", str(out), "--precision", "fp32"]
    assert main([*command, *asks]) == 0
    assert set(RunDir(out).read_report()["win_rate"]) == {"reward"}
    asked = [json.loads(line) for line in RunDir(out).judge_log.read_text().splitlines()]
    assert len(asked) == 4 * 2  # prompts, in both orders
