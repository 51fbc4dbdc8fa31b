"""Options with several values: after one flag, or each after a flag of its own."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf import cli
from rlhf.config.paths import read_setting

# Two values of every list option, and what else the option needs; {} stands for the option.
EXPORTED, SERVED = "--db labels.db --out rankings", "--policy runs/first/ppo"
TRAINED = "--rankings rankings --model m --out o"
OPTIONS = {
    ("import", "--files"): ("{} --db labels.db", "a.jsonl b.jsonl"),
    ("label", "--flags"): ("--db labels.db {}", "unsafe untrue"),
    ("label", "--model"): ("--db labels.db {}", "one two"),
    ("export", "--kind"): (f"{EXPORTED} {{}}", "human signal"),
    ("export", "--annotator"): (f"{EXPORTED} {{}}", "ann bob"),
    ("train-reward", "--data.thumbs-down-flags"): (f"{TRAINED} {{}}", "unsafe broken"),
    ("train-reward", "--seeds"): (f"{TRAINED} {{}}", "1 2"),
    ("serve", "--engine-flags"): (f"{SERVED} {{}}", "one two"),
    ("ppo", "--reward"): ("--model m --reference r --out o {}", "one two"),
    ("ppo", "--rewards.weights"): (
        "--model m --reference r --out o --reward one --reward two {}",
        "0.5 2",
    ),
    ("benchmark", "--runs"): ("{} --out o", "runs/first/ppo runs/first/int8"),
    ("benchmark", "--batch-sizes"): ("run --out o {}", "1 8"),
    ("benchmark", "--prompt-tokens"): ("run --out o {}", "64 128"),
    ("benchmark", "--answer-tokens"): ("run --out o {}", "64 128"),
    ("loop", "--prompts"): ("--model m --out o {}", "a.jsonl b.jsonl"),
    ("loop", "--lead-may"): ("--model m --out o {}", "rounds new_rankings"),
    ("plan", "--like"): ("--model m --price-per-hour 2 {}", "runs/a runs/b"),
    ("users", "--people"): ("assign law --db labels.db {}", "ann bob"),
    ("users", "--team"): ("assign law --db labels.db {}", "red blue"),
    ("status", "--runs"): ("{}", "runs/first runs/second"),
}
BY_CONFIG = "--config"  # of every command: words after its file are those without a flag
listed = pytest.mark.parametrize(("command", "flag"), OPTIONS)


def settings_of(command: str, words: str) -> Any:
    app = cli.build_app()
    given = [command, *shlex.split(words)]
    _, bound, _ = app.parse_args(given, exit_on_error=False, print_error=False)
    return bound.arguments["settings"]


def test_the_table_above_names_every_list_option() -> None:
    app = cli.build_app()
    found = set()
    for command in cli.COMMANDS:
        for one in app[command].assemble_argument_collection():
            if one.show and one.token_count()[1] and BY_CONFIG not in one.names:
                found.add((command, one.name))
    assert found == OPTIONS.keys()


@listed
def test_a_list_option_takes_its_values_after_one_flag_or_after_several(
    command: str, flag: str
) -> None:
    frame, values = OPTIONS[command, flag]
    several = " ".join(f"{flag} {value}" for value in values.split())
    forms = [settings_of(command, frame.format(one)) for one in (f"{flag} {values}", several)]
    assert forms[0] == forms[1]
    found = read_setting(forms[0], flag.removeprefix("--").replace("-", "_"))
    assert list(map(str, found)) == [str(type(found[0])(value)) for value in values.split()]


@listed
def test_a_list_option_without_a_value_is_refused(command: str, flag: str, capsys) -> None:
    frame, _ = OPTIONS[command, flag]
    assert cli.main([command, *shlex.split(frame.format("")), flag]) == 2
    assert f"{flag} needs a value" in " ".join(capsys.readouterr().err.split())


def test_words_after_the_file_of_config_are_those_without_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "status.yaml"
    file.write_text("full: true\n")
    found = settings_of("status", f"--config {file} runs/first")
    assert list(map(str, found.runs)) == ["runs/first"]
    assert found.full


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--config first.yaml second.yaml",
            "--config takes one file, and second.yaml follows it "
            "Repeat the flag: --config first.yaml --config second.yaml.",
        ),
        ("--names more", "more belongs to no flag Name the flag that it is a value of."),
    ],
)
def test_a_word_that_no_flag_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, given: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text("db: labels.db\n")
    assert cli.main(["export", *given.split(), "--db", "labels.db", "--out", "o"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"error {message} See: rlhf export --help"


def test_a_list_takes_negative_numbers() -> None:
    found = settings_of(
        "ppo", "--model m --reference r --out o --reward a b --rewards.weights 1 -2"
    )
    assert found.rewards.weights == (1.0, -2.0)
