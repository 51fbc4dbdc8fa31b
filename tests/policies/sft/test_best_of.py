"""`rlhf sft --best-of`: which reference outputs are chosen, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from policies.reference.shards import shard_name, write_shard
from policies.reference.store import open_store
from policies.reference.summary import write_manifest
from policies.sft.best_of import choose_best
from policies.sft.settings import SFTSettings
from rlhf.cli import main
from rlhf.errors import ConfigError
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir
from tests.policies.stores import FACTS, MODEL, REWARD, build_row, build_store


@pytest.fixture(autouse=True)
def _own_precision():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def store(tmp_path) -> Path:
    """Three outputs to each of five prompts, in the order of their rewards below."""
    rewards = {
        ("train", 0): (0.5, 2.0, 1.0),
        ("train", 1): (1.0, 3.0, 3.0),  # two are best
        ("train", 2): (1.5, 1.5, 1.5),  # none is
        ("train", 3): (0.0, 1.0, 2.0),  # all say the same
        ("test", 4): (4.0, 1.0, 2.0),
    }
    run = RunDir(tmp_path / "reference")
    for split in ("train", "test"):
        rows = [
            build_row(number, sample, split, reward)
            for (of, number), given in rewards.items()
            if of == split
            for sample, reward in enumerate(given)
        ]
        same = [replace(row, text="same") if row.prompt.text == "p3" else row for row in rows]
        write_shard(run.outputs / shard_name(split, 0), same, REWARD["hash"])
    names = [shard_name(split, 0) for split in ("train", "test")]
    report = write_manifest(run.outputs, names, {**FACTS, "reward": REWARD}, 3)
    write_json(run.stage_file, {"stage": "reference", "status": "done", "inputs": {"model": MODEL}})
    write_json(run.report_json, report)
    return run.path


def demonstration(prompt: str, answer: str) -> dict:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def test_the_best_output_of_each_prompt_is_chosen(store) -> None:
    choice = choose_best(open_store(store / "outputs"))
    assert choice.rows == {
        "train": [demonstration("p0", "answer 0.1"), demonstration("p1", "answer 1.1")],
        "test": [demonstration("p4", "answer 4.0")],
    }
    assert choice.counts == {
        "samples": 3,
        "prompts": 4,
        "chosen": 2,
        "no_choice": 2,
        "tied": 1,
        "unfinished": 1,  # in these rows, those whose numbers add up to an odd one
        "reward": {
            "all": pytest.approx(((0.5 + 2 + 1) / 3 + (1 + 3 + 3) / 3) / 2),
            "chosen": 2.5,
        },
    }


def sft(capsys, model: Path, source: Path, out: Path, *more: str) -> dict | str:
    command = ["sft", "--best-of", str(source), "--model", str(model), "--out", str(out), "--json"]
    code = main([*command, "--precision", "fp32", *more])
    captured = capsys.readouterr()
    return captured.err if code else json.loads(captured.out.splitlines()[-1])


def test_a_model_learns_them(capsys, store, tiny_model, tmp_path) -> None:
    more = ("--epochs", "20", "--learning-rate", "0.01")
    report = sft(capsys, tiny_model, store, tmp_path / "out", *more)
    assert report["demonstrations"] == {"train": 2, "test": 1}
    assert report["best_of"]["chosen"] == 2
    assert report["held_out_loss"]["after"] < report["held_out_loss"]["before"]
    inputs = RunDir(tmp_path / "out").inputs
    assert inputs["reward"] == REWARD
    assert inputs["reference"] == {
        "path": str(store),
        "hash": open_store(store / "outputs").content_hash,
    }


def test_refusals(capsys, tiny_model, tmp_path) -> None:
    out = tmp_path / "out"
    build_store(tmp_path / "plain")
    assert sft(capsys, tiny_model, tmp_path / "plain", out) == (
        f"error The outputs in {tmp_path / 'plain'} have no rewards\n"
        f"  Add them: rlhf reference --reward RM --out {tmp_path / 'plain'}\n"
    )
    build_store(tmp_path / "single", samples=1, rewarded=True)
    assert "has one output of each prompt: there is no best to choose\n  Store several: rlhf " in (
        sft(capsys, tiny_model, tmp_path / "single", out)
    )
    build_store(tmp_path / "equal", rewarded=True)  # all outputs of a prompt have its number
    assert "No training prompt of" in sft(capsys, tiny_model, tmp_path / "equal", out)
    assert "does not hold a finished reference stage" in sft(capsys, tiny_model, tmp_path, out)
    assert not out.exists()
    with pytest.raises(ConfigError, match="There is nothing to train on: give --demonstrations or"):
        SFTSettings(model="m", out=out)
    with pytest.raises(ConfigError, match="--demonstrations and --best-of exclude each other"):
        SFTSettings(model="m", out=out, demonstrations=out, best_of=out)
