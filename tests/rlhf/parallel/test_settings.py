"""Settings of processes and clusters: their old flags, and what 0 once meant."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.cli import main
from rlhf.errors import ConfigError
from rlhf.parallel.settings import GroupSettings, ParallelSettings, TrainingParallelSettings

COMMANDS = {
    "ppo": ["--reward", "r", "--reference", "ref"],
    "train-reward": ["--rankings", "r"],
}
CLUSTER = {
    "processes": 2,
    "sharding": "fsdp",
    "offload": True,
    "shard_group": 2,
    "tensor_parallel": 1,
    "stall_timeout": 60.0,
    "max_restarts": 3,
    "preflight": True,
    "save_minutes": 30.0,
    "track": "tensorboard",
    "profile": 2,
    "notify": "https://chat.example",
}
OFF = {"sharding": "none", "shard_group": 0, "stall_timeout": 0, "save_minutes": 0, "profile": 0}


def resolve(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The settings that --dry-run shows."""
    assert main([command, "--model", "m", "--out", "o", *words, "--dry-run", "--json"]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out.splitlines()[-1])["settings"]
    return found


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no models here whose memory could be planned."""
    for module in ("ppo", "train_reward"):
        monkeypatch.delattr(f"rlhf.commands.models.{module}.memory_plan")


@pytest.mark.parametrize("command", COMMANDS)
def test_old_flags_and_files_mean_what_they_meant(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in CLUSTER.items()
    ]
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(CLUSTER), encoding="utf-8")
    by_flags = resolve(command, [*COMMANDS[command], *flags], capsys)
    by_file = resolve(command, [*COMMANDS[command], "--config", str(file)], capsys)
    assert by_flags == by_file
    assert by_flags["parallel"] == {
        "offload": True,
        "shard_group": 2,
        "tensor_parallel": 1,
        "stall_timeout": 60.0,
        "max_restarts": 3,
        "preflight": True,
        "reduce_dtype": "fp32",
    }
    assert by_flags["checkpoint"]["every_minutes"] == 30
    same = ("processes", "sharding", "track", "profile", "notify")
    assert {name: by_flags[name] for name in same} == {name: CLUSTER[name] for name in same}


@pytest.mark.parametrize("command", COMMANDS)
def test_off_was_0_once(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(OFF), encoding="utf-8")
    flags = [word for name, value in OFF.items() for word in (f"--{name}", str(value))]
    for words in (flags, ["--config", str(file)], ["--parallel.stall-timeout", "none"]):
        found = resolve(command, [*COMMANDS[command], *words], capsys)
        assert found["sharding"] == "auto"
        assert found["parallel"]["shard_group"] is None
        assert found["parallel"]["stall_timeout"] is None
        assert found["checkpoint"]["every_minutes"] is None
        assert found["profile"] is None


def test_ppo_too_had_zeros_for_off(capsys: pytest.CaptureFixture[str]) -> None:
    zeros = ["--lora-rank=0", "--kl.audit-every=0", "--guards.patience=0", "--micro-tokens=0"]
    found = resolve("ppo", [*COMMANDS["ppo"], *zeros], capsys)
    assert found["lora"]["rank"] is None
    assert found["kl"]["audit_every"] is None
    assert found["guards"]["patience"] is None
    assert found["batch"]["micro_tokens"] is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ParallelSettings(shard_group=0), "--parallel.shard-group is 0"),
        (lambda: ParallelSettings(stall_timeout=-1), "--parallel.stall-timeout is -1"),
        (lambda: ParallelSettings(tensor_parallel=0), "--parallel.tensor-parallel is 0"),
        (lambda: TrainingParallelSettings(max_restarts=-1), "--parallel.max-restarts is -1"),
        (lambda: GroupSettings(processes=0), "--processes is 0"),
    ],
)
def test_a_value_out_of_range_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.problem == problem


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_these_settings_together_and_no_empty_defaults(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    panel = shown.partition("Processes and clusters")[2].partition("╰")[0]
    for flag in ("--processes", "--sharding", "--parallel.offload", "--notify"):
        assert flag in panel
    for leak in ("[default: ()]", "[default: {}]", '[default: ""]', "[default: '']"):
        assert leak not in " ".join(shown.replace("│", "").split())
