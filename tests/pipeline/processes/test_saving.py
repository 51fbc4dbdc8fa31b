"""A sharded model is saved weight by weight, into the files of one that is gathered whole."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import build_tiny_model
from tests.servers.commands import Command, finish_group, start_group

WIDTH, INNER, LAYERS = 512, 2048, 6
LARGEST = 4 * WIDTH * INNER  # bytes of the largest weight, 4 MB
LARGE = 4 * LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER)  # 100 MB
MEGABYTE = 2**20


def start(*arguments: str | Path) -> list[Command]:
    return start_group(2, "-m", "tests.pipeline.processes.saving", *arguments)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny and a larger model."""
    folder = tmp_path_factory.mktemp("saving")
    build_tiny_model(folder / "tiny")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "start")
    return folder


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program has saved."""
    folder = tmp_path_factory.mktemp("saved")
    done = finish_group(start(models / "tiny", models / "start", folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("sharding", ["fsdp", "offloaded", "zero3", "tensor-parallel"])
def test_the_files_are_those_of_the_gathered_model(folder: Path, sharding: str) -> None:
    ours, theirs = folder / sharding / "ours", folder / sharding / "theirs"
    names = sorted(path.name for path in theirs.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert sorted(path.name for path in ours.iterdir()) == names
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_no_process_needs_memory_for_more_than_a_few_weights(folder: Path, models: Path) -> None:
    limit = 4 * LARGEST + 16 * MEGABYTE
    assert limit < LARGE / 2
    for rank in (0, 1):
        found = json.loads((folder / f"found.{rank}").read_text())
        assert found["growth"] < limit
    places = (folder / "large", models / "start")
    saved, started = (load_file(place / "model.safetensors") for place in places)
    assert saved.keys() == started.keys()
    assert all(torch.equal(saved[name], started[name]) for name in saved)


def test_a_reward_model_that_differs_when_read_again_is_found_out(folder: Path) -> None:
    found = [json.loads((folder / f"found.{rank}").read_text())["refusal"] for rank in (0, 1)]
    assert "1 weights differ, such as score.weight" in found[0]
    assert found[1] == ""


def test_a_kill_in_the_middle_leaves_nothing_under_the_final_name(
    models: Path, tmp_path: Path
) -> None:
    group = start(models / "tiny", models / "start", tmp_path, "killed")
    partial = tmp_path / ".killed.partial" / "model.safetensors"
    limit = time.monotonic() + 300
    while time.monotonic() < limit and all(one.poll() is None for one in group):
        if partial.is_file() and partial.stat().st_size > LARGE / 4:
            break
        time.sleep(0.001)
    for process in group:
        process.kill()
    assert [process.wait() for process in group] == [-signal.SIGKILL] * 2
    assert partial.is_file()
    assert not (tmp_path / "killed").exists()
