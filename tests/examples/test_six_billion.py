"""The settings of examples/six_billion load, and its README says what the plan says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from reward.memory import plan_memory
from rlhf.cli import main
from rlhf.config import flatten
from rlhf.planning.plan import GIB, ShardLayout, shard_plan
from rlhf.planning.planner import read_shape
from tests.settings import reward_settings

FOLDER = Path(__file__).parents[2] / "examples" / "six_billion"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
MODEL = FOLDER / "llama_6b"
QLORA = {"adapter": "qlora", "batch.micro_tokens": 2048}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("ddp_lora", {}), ("ddp_full", {}), ("fsdp_full", {}), ("ddp_lora", QLORA)],
)
def test_the_table_says_what_the_plan_says(name, changes):
    values = (
        flatten(yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))) | changes
    )
    settings = reward_settings(
        rankings=Path("r"), model=str(MODEL), out=Path("o"), processes=8, **values
    )
    plan = plan_memory(settings, read_shape(str(MODEL)))
    peak = shard_plan(plan, ShardLayout(settings.sharding, 8)).peak
    flags = " --adapter qlora --batch.micro-tokens 2048" if changes else ""
    (row,) = (line for line in README.splitlines() if line.startswith(f"| `{name}.yaml{flags}` |"))
    assert f"| {peak / GIB:.1f} GiB" in row


def test_the_model_has_six_billion_parameters():
    assert read_shape(str(MODEL)).parameters == pytest.approx(6.08e9, rel=0.001)
    assert "6.08e9 parameters" in README


def test_the_dry_run_of_the_readme_needs_no_weights(monkeypatch, capsys):
    monkeypatch.chdir(FOLDER.parents[1])
    (command,) = re.findall(r"^rlhf (.* --dry-run)$", README, flags=re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "16.96" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "shown"),
    re.findall(r"^```console\n\$ rlhf (.*)\n((?s:.*?))```", README, re.MULTILINE),
)
def test_the_plans_of_the_phases_are_what_the_command_says(command, shown, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER.parents[1])
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_each_phase_has_its_part_of_the_data_and_a_checklist(monkeypatch, capsys):
    monkeypatch.chdir(FOLDER.parents[1])
    phases = re.split(r"^### \d\. ", README.partition("## Then train")[0], flags=re.MULTILINE)[1:]
    assert len(phases) == 4
    for phase, limit in zip(phases, ("1%", "5%", "50%", "100%"), strict=True):
        assert phase.count("```console\n$ rlhf plan ") == 1
        (command,) = re.findall(r"^rlhf (train-reward .*)$", phase, flags=re.MULTILINE)
        command = command.replace("MODEL", str(MODEL)).replace("URL", "https://example.org")
        assert main([*shlex.split(command), "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["settings"]["data"]["limit"] == limit
        assert phase.count("- [ ] ") >= 2
