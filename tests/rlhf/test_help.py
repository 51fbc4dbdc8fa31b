"""What `--help` shows, of every command and quickly."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from rlhf import __version__, cli


def test_help_imports_neither_torch_nor_other_slow_packages() -> None:
    code = (
        "import sys; from rlhf.cli import COMMANDS, main; "
        "codes = {main([*command.split(), '--help']) for command in ('', *COMMANDS)}; "
        "slow = {'torch', 'transformers', 'numpy', 'gradio', 'datasets', 'scipy'}; "
        "print('LOADED', sorted(slow & set(sys.modules)), codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED [] {0}"
    assert done.stderr == ""


def test_help_lists_required_settings_first_and_leaves_empty_negations_out(capsys) -> None:
    assert cli.main(["reference", "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^│ .  (--[a-z]+) ", shown, re.M)[:2] == ["--out", "--prompts"]
    assert "--sampling.no-reuse" in shown  # which is on
    assert "--no-inspect" not in shown
    assert shown.index("--seed ") < shown.index("--processes ")  # those of clusters come last
    assert cli.main(["train-reward", "--help"]) == 0
    assert (
        "--data.no-reads-thinking" in capsys.readouterr().out
    )  # left out, it is as the model says
    assert cli.main(["ppo", "--help"]) == 0
    shown = capsys.readouterr().out
    required = ["--model", "--reward", "--reference", "--out"]
    assert re.findall(r"^│ \*  (--[a-z]+) ", shown, re.M) == required
    assert re.findall(r"^│ .  (--[a-z]+) ", shown, re.M)[:4] == required
    assert "--empty-" not in shown


def test_help_shows_settings_by_group_and_an_example_last(probe, capsys) -> None:
    probe()
    assert cli.main(["probe", "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^╭─ (.*?) ─", shown, re.M) == ["Settings", "brake", "Every command"]
    group = shown[shown.index("─ brake ─") : shown.index("─ Every command ─")]
    assert re.findall(r"--[a-z.]+", group) == ["--brake.source", "--brake.coefficient"]
    assert "A group of settings." in group
    for words in ("Do what this test wants", "Peak learning rate", "3e-06", "--config", "--json"):
        assert words in shown
    assert shown.split("Example:")[1].strip() == "rlhf probe --model m"


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_the_example_of_every_help_page(
    command: str, tmp_path: Path, tiny_model: Path, monkeypatch, capsys
) -> None:
    example = import_module(f"rlhf.commands.{cli.COMMANDS[command]}").EXAMPLE
    assert all(len(line) <= 78 for line in example.splitlines())  # fits a terminal as it is
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out.split("Example:")[1]
    assert [line.strip() for line in shown.split("\n") if line.strip()] == [
        line.strip() for line in example.splitlines()
    ]
    program, *words = shlex.split(example.replace("\\\n", ""))
    assert (program, words[0]) == ("rlhf", command)
    monkeypatch.chdir(tmp_path)
    for folder in ("models/SmolLM2-135M-Instruct", "runs/first/reward"):
        shutil.copytree(tiny_model, folder)
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().err == ""


def test_a_setting_named_like_the_group_of_processes_is_shown_with_the_others(capsys) -> None:
    assert cli.main(["annotate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--parallel" in shown
    assert "Processes and clusters" not in shown


def test_help_names_every_command(capsys) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"│ {name} " not in shown] == []


def test_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_settings_with_help_and_a_run(name: str) -> None:
    module = import_module(f"rlhf.commands.{cli.COMMANDS[name]}")
    assert module.run.__doc__
    assert module.describe.__doc__
    assert module.Settings.__doc__
    types = get_type_hints(module.Settings)
    groups = [types[one.name] for one in fields(module.Settings) if is_dataclass(types[one.name])]
    for settings in (module.Settings, *groups):
        kinds = [kind for kind in settings.__mro__ if kind is not object]
        files = [Path(sys.modules[kind.__module__].__file__) for kind in kinds]
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        for one in fields(settings):
            line = re.search(
                rf"^    {one.name}: .*(\n        .*|\n    [)\]].*)*\n    \"\"\"", source, re.M
            )
            assert line, f"{name}: no help under {one.name}"
