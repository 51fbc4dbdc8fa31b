"""Of two processes the main one hashes models, rankings and stores; the other believes it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli import main
from rlhf.records import fingerprints
from tests.policies.training import TrainingInputs, build_training
from tests.reward.conftest import build_record, export
from tests.servers.commands import run_group

PROGRAM = '''
import contextlib, io, json, os, sys
from pathlib import Path
from rlhf.records import fingerprints

hashed = []

def note(name, plain):
    """Note what a function is called with, in all modules, which may have imported it already."""
    def call(*inputs, **named):
        hashed.append(str(inputs[0]))
        return plain(*inputs, **named)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is plain:
            setattr(module, name, call)

from policies.reference import shards
from rlhf.cli import main
note("file_hash", fingerprints.file_hash)
note("require_unchanged", shards.require_unchanged)
from rlhf.ranks import exit_process, rank

found = []
for command in json.loads(Path(sys.argv[1]).read_text()):
    hashed.clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(command)
    found.append({"code": code, "said": said.getvalue(), "hashed": list(hashed)})
Path(sys.argv[1]).with_suffix(f".{rank()}").write_text(json.dumps(found))
exit_process(0)
'''


def run_two(folder: Path, commands: list[list[str]]) -> list[list[dict[str, Any]]]:
    """Run commands one after the other in two processes; what each process found of each."""
    program, words = folder / "program.py", folder / "commands.json"
    program.write_text(PROGRAM, encoding="utf-8")
    words.write_text(json.dumps(commands), encoding="utf-8")
    done = run_group(2, program, words)
    assert done.returncode == 0, done.stderr
    return [json.loads(words.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TrainingInputs:
    return build_training(tmp_path_factory.mktemp("hashes"), tiny_model)


@pytest.fixture(scope="module")
def two(
    made: TrainingInputs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What both processes found, by command: first those that are refused."""
    folder = tmp_path_factory.mktemp("two")
    rankings = export(folder / "rankings", [build_record(n) for n in range(6)])
    broken = folder / "broken"
    shutil.copytree(made.reference, broken)
    (broken / "outputs" / "train-00000.parquet").unlink()
    changed = folder / "changed"
    shutil.copytree(rankings, changed)
    (changed / "train.jsonl").write_text("{}\n", encoding="utf-8")
    reward = ["train-reward", "--precision", "fp32", "--model"]
    ppo = made.arguments(folder / "ppo")
    ppo_of_broken = replace(made, reference=broken).arguments(folder / "x")
    prompts = str(made.reference.parent / "prompts.jsonl")
    commands = {
        "no model": [*reward, "./none", "--rankings", str(rankings), "--out", str(folder / "x")],
        "changed rankings": [
            *(*reward, str(made.model), "--rankings", str(changed)),
            *("--out", str(folder / "x")),
        ],
        "broken store": [*ppo_of_broken],
        "reference": [
            *("reference", "--prompts", prompts, "--model", str(made.model)),
            *("--reward", str(made.reward), "--out", str(folder / "reference")),
            *("--max-new-tokens", "4", "--precision", "fp32", "--sharding", "fsdp"),
        ],
        "ppo": [*ppo, "--sharding", "fsdp"],
        "train-reward": [
            *(*reward, str(made.model), "--rankings", str(rankings)),
            *("--out", str(folder / "reward"), "--sharding", "fsdp"),
        ],
    }
    found = run_two(folder, list(commands.values()))
    return dict(zip(commands, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("command", ["reference", "ppo", "train-reward"])
def test_the_main_process_alone_hashes(two, command: str) -> None:
    main, other = two[command]
    assert (main["code"], other["code"]) == (0, 0), main["said"] + other["said"]
    assert main["hashed"]
    assert other["hashed"] == []


def test_weights_are_hashed_once_in_all_stages_and_a_shard_once_in_each(two, made) -> None:
    stages = ("reference", "ppo", "train-reward")
    hashed = [path for name in stages for path in two[name][0]["hashed"]]
    weights = [path for path in hashed if path.endswith(".safetensors")]
    # of the model already by the command that is refused for its store
    assert weights.count(str(made.reward / "model.safetensors")) == 1
    assert str(made.model / "model.safetensors") not in weights
    shards = [path for path in two["ppo"][0]["hashed"] if path.endswith(".parquet")]
    assert sorted(shards) == sorted(map(str, (made.reference / "outputs").glob("*.parquet")))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("no model", "./none is not a model (no such folder)"),
        ("changed rankings", "do not match its manifest.json (content hash differs)"),
        ("broken store", "train-00000.parquet is missing or was changed after the store was"),
    ],
)
def test_what_the_main_process_refuses_all_refuse_in_the_same_words(
    two, command: str, problem: str
) -> None:
    main, other = two[command]
    assert (main["code"], other["code"]) == (2, 2)
    assert problem in main["said"]
    assert other["said"] == main["said"]


def test_evaluate_hashes_each_model_once(made, tmp_path: Path, monkeypatch) -> None:
    hashed, plain = [], fingerprints.file_hash

    def note(path: Path) -> str:
        hashed.append(path)
        return plain(path)

    monkeypatch.setattr(fingerprints, "file_hash", note)
    monkeypatch.setattr(fingerprints, "_digests", {})
    words = [
        *("evaluate", "--policy", str(made.model), "--reference", str(made.reference)),
        *("--reward", str(made.reward), "--out", str(tmp_path / "out"), "--precision", "fp32"),
    ]
    assert main(words) == 0
    assert sorted(path for path in hashed if path.suffix == ".safetensors") == sorted(
        folder / "model.safetensors" for folder in (made.model, made.reward)
    )
