import subprocess
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from rlhf.modeling.model_card import model_card
from rlhf.modeling.models import load_causal_lm, new_reward_model, save_model
from rlhf.parallel.settings import ClusterSettings
from rlhf.run import provenance
from rlhf.run.provenance import (
    all_packages,
    describe_environment,
    driver_version,
    nccl_version,
)
from rlhf.run.rundir import RunDir, open_stage, stage_status

STAGE = {
    "stage": "ppo",
    "inputs": {
        "model": {"path": "maker/base-1B", "hash": "abc"},
        "reward": {"path": "runs/a/reward/model", "hash": "def"},
    },
    "seed": 7,
    "processes": 2,
    "command": ["rlhf", "ppo", "--seed", "7"],
    "git_commit": "1234567-dirty",
    "versions": {"torch": "2.13.0", "deepspeed": None},
    "started_at": "2026-01-02T03:04:05+00:00",
}


def test_a_card_says_where_a_model_comes_from_and_the_hub_reads_it() -> None:
    card = ModelCard(model_card(STAGE), ignore_metadata_errors=False)
    assert card.data.base_model == "maker/base-1B"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["rlhf", "ppo"]
    assert "| reward | `runs/a/reward/model` | `def` |" in card.text
    assert "Command: `rlhf ppo --seed 7`, seed 7, 2 processes." in card.text
    assert "Code: 1234567-dirty. Versions: torch 2.13.0." in card.text


def test_a_local_base_is_no_name_on_the_hub(tmp_path: Path) -> None:
    local = {**STAGE, "inputs": {"model": {"path": str(tmp_path), "hash": "abc"}}}
    metadata = yaml.safe_load(model_card(local).split("---")[1])
    assert "base_model" not in metadata


def test_the_environment_is_whole() -> None:
    found = describe_environment()
    assert found["versions"]["torch"]
    assert {"host", "cpus", "memory_bytes", "gpus", "cuda"} <= set(found["hardware"])
    assert found["processes"] == 1
    assert any(line.startswith("torch==") for line in all_packages().splitlines())


@pytest.mark.parametrize(
    "words", [["--notify", "https://hooks/secret"], ["--notify=https://hooks/secret"]]
)
def test_the_command_is_kept_without_the_address_to_notify(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rlhf", "ppo", *words, "--seed", "7"])
    command = describe_environment()["command"]
    assert " ".join(command).replace("=", " ") == "rlhf ppo --notify … --seed 7"


def test_processes_are_those_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert describe_environment()["processes"] == 3


def test_the_code_is_known_by_its_commit_and_the_difference_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rlhf" / "code.py"
    file.parent.mkdir()
    file.write_text("old = 1\n\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    monkeypatch.setattr(provenance, "CODE", file.parent)
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert describe_environment()["git_commit"] is None  # not a checkout
    commit = ["commit", "--quiet", "--allow-empty", "--message", "m"]
    for words in (["init", "--quiet"], commit):
        subprocess.run([*git, *words], check=True)
    assert describe_environment()["git_commit"] is None  # of something else
    for words in (["add", "."], commit):
        subprocess.run([*git, *words], check=True)
    found, settings = describe_environment(), ClusterSettings()
    assert len(found["git_commit"]) >= 7
    assert found["code_diff"] is None
    file.write_bytes(b"new = 'Gr\xfc\xdfe'\n\n")  # in Latin-1
    changed = describe_environment()
    assert changed["git_commit"] == found["git_commit"] + "-dirty"
    run = open_stage(tmp_path / "run", "reward", settings, {}, resume=False)
    diff = run.diff_file.read_text(encoding="utf-8")
    assert "-old = 1\n+new = " in diff
    assert diff.endswith("\n \n")  # without the blank line git would not apply it
    assert changed["code_diff"] == sha256(diff.removesuffix("\n").encode()).hexdigest()[:16]
    with pytest.raises(KeyboardInterrupt), stage_status(run):
        raise KeyboardInterrupt
    file.write_text("old = 1\n\n")
    open_stage(run.path, "reward", settings, {}, resume=True)
    assert run.read_stage()["code_diff"] is None
    assert not run.diff_file.exists()  # of the attempt before


def test_driver_nccl_and_image_are_kept_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tmp_path / "version"
    assert driver_version(proc) is None
    proc.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert driver_version(proc) == "550.54.15"
    monkeypatch.delenv("RLHF_IMAGE", raising=False)
    assert describe_environment()["hardware"]["image"] is None
    monkeypatch.setenv("RLHF_IMAGE", "registry/rlhf@sha256:abc")
    found = describe_environment()["hardware"]
    assert found["image"] == "registry/rlhf@sha256:abc"
    assert found["nccl"] is None or found["cuda"]
    built = SimpleNamespace(
        version=SimpleNamespace(cuda="12.8"),
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 3))),
    )
    assert nccl_version(built) == "2.27.3"
    assert nccl_version(SimpleNamespace(version=SimpleNamespace(cuda=None))) is None  # of CPUs
    assert nccl_version(None) is None  # not loaded


def test_a_card_says_what_the_training_cost() -> None:
    assert "Cost" not in model_card(STAGE)
    assert "\nCost: 1.5 device-hours.\n" in model_card(STAGE, 5400)
    assert "\nCost: 1.5 device-hours at 4 each, 6 in all.\n" in model_card(STAGE, 5400, 4)


def test_a_stage_leaves_its_packages_and_a_saved_model_its_card(
    tmp_path: Path, tiny_model: Path
) -> None:
    inputs = {"model": {"path": "maker/base", "hash": "abc"}}
    settings = ClusterSettings()
    run = open_stage(tmp_path / "run", "reward", settings, inputs, resume=False)
    assert run.packages_file.read_text(encoding="utf-8") == all_packages()
    assert run.diff_file.is_file() == (run.read_stage()["code_diff"] is not None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    save_model(load_causal_lm(str(tiny_model)), tokenizer, run.model)
    assert ModelCard.load(run.model / "README.md").data.tags == ["rlhf", "reward"]
    save_model(load_causal_lm(str(tiny_model)), tokenizer, tmp_path / "plain" / "model")
    # `rlhf distill` makes both kinds
    distilled = open_stage(tmp_path / "distilled", "distill", settings, inputs, resume=False)
    for model, folder, kind in (
        (load_causal_lm(str(tiny_model)), distilled.policy, "text-generation"),
        (new_reward_model(str(tiny_model), 0, 0), distilled.model, "text-classification"),
    ):
        save_model(model, tokenizer, folder)
        assert ModelCard.load(folder / "README.md").data.pipeline_tag == kind
    assert not RunDir(tmp_path / "plain").stage_file.exists()
    assert not (tmp_path / "plain" / "model" / "README.md").exists()
