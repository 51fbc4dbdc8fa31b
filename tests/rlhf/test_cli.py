"""Settings from files and flags, what is printed, and how a command ends that cannot go on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rlhf import cli
from rlhf.errors import GuardError, InputError, InterruptedRunError, RlhfError
from tests.rlhf.conftest import RESULT, Brake, Settings


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("flag", ["--prioritise", "--prioritise=True"])
def test_the_old_way_to_order_the_queue_names_the_new_one(flag, capsys) -> None:
    words = ["--db", "d", "--reward", "r", "--dry-run"]
    assert cli.main(["prioritize", *words]) == 0
    wanted = capsys.readouterr().out
    assert cli.main(["annotate", flag, *words]) == 0
    shown = capsys.readouterr()
    assert shown.out == wanted
    assert shown.err == "rlhf annotate --prioritise is now: rlhf prioritize\n"


def test_the_old_way_to_order_the_queue_switched_off_or_in_a_file(tmp_path, capsys) -> None:
    words = ["--db", "d", "--annotator", "signal:a:b", "--dry-run"]
    assert cli.main(["annotate", "--prioritise=false", *words]) == 0
    file = tmp_path / "old.yaml"
    file.write_text("db: d\nprioritise: true\nreward: r\n")
    capsys.readouterr()
    assert cli.main(["annotate", "--annotator", "judge", "--config", str(file)]) == 2
    assert " ".join(capsys.readouterr().err.split()) == (
        f"error prioritise in {file} is now the command rlhf prioritize "
        f"Delete the line and type: rlhf prioritize --config {file}"
    )


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            "annotate --db d --annotator signal:a:b --model m --parallel 8",
            "--model and --parallel have no effect with a signal",
        ),
        (
            "annotate --db d --annotator judge --endpoint http://a --model m --tie-within 1",
            "--tie-within has no effect with a judge",
        ),
        (
            "label --db d --top-p 0.9",
            "--top-p has no effect without --model or --endpoint (live mode)",
        ),
        ("users add ann --db d", ""),
        ("users disable ann --db d --role lead", "--role has no effect with disable"),
        ("users token shop --db d --password-stdin", "--password-stdin has no effect with token"),
        ("evaluate --out r --from-db d --mix", "--mix has no effect without --to-db"),
    ],
)
def test_settings_of_another_mode_are_refused(capsys, command: str, problem: str) -> None:
    assert cli.main([*command.split(), "--dry-run"]) == (2 if problem else 0)
    assert capsys.readouterr().err == (f"error {problem}\n  Leave it out.\n" if problem else "")


def test_files_compose_left_to_right_and_flags_win(probe, tmp_path: Path) -> None:
    seen = probe()
    first = write(
        tmp_path / "a.yaml",
        "model: first\nsteps: 1\nlearning_rate: 1e-5\nbrake:\n  source: none\n  coefficient: 1\n",
    )
    second = write(tmp_path / "b.yaml", "steps: 2\nnote: second\nbrake:\n  coefficient: 2\n")
    words = ["probe", "--config", first, "--config", second, "--note", "flag", "--fast"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--brake.coefficient", "9"]) == 0
    brake = Brake(source="none", coefficient=2.0)
    expected = Settings(
        model="first", steps=2, learning_rate=1e-5, note="flag", fast=True, brake=brake
    )
    assert seen[0] == expected
    assert seen[1].brake == Brake(source="none", coefficient=9.0)


@pytest.mark.parametrize(
    "others", [[], ["--tags=x", "--tags=y", "--learning-rate=2e-5", "--brake.source=none"]]
)
def test_what_a_dry_run_prints_can_be_read_back(probe, tmp_path, capsys, others: list[str]) -> None:
    seen = probe(plan="Memory per process\n\n  weights: 1.0 GiB")
    words = ["probe", "--model", "a: b # c", *others]
    assert cli.main([*words, "--dry-run"]) == 0
    assert seen == []
    printed = capsys.readouterr().out
    assert printed.endswith("# Memory per process\n# \n#   weights: 1.0 GiB\n")

    assert cli.main(["probe", "--config", write(tmp_path / "printed.yaml", printed)]) == 0
    assert cli.main(words) == 0
    assert seen[0] == seen[1]
    assert seen[0].tags == (("x", "y") if others else ())


def test_a_dry_run_as_json_holds_settings_and_plan(probe, capsys) -> None:
    probe(plan="the plan")
    assert cli.main(["probe", "--model", "m", "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"]["brake"] == {"source": "reference", "coefficient": 0.1}
    assert printed["memory_plan"] == "the plan"


def test_json_is_one_object_on_the_last_line_of_stdout(probe, capsys) -> None:
    probe()
    assert cli.main(["probe", "--model", "m", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == RESULT


def test_only_the_main_process_of_a_group_prints_the_result(probe, monkeypatch, capsys) -> None:
    probe()
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["probe", "--model", "m", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_people_read_a_sentence_with_data_as_it_is(probe, capsys) -> None:
    probe()
    assert cli.main(["probe", "--model", "m"]) == 0
    assert capsys.readouterr().out == "Did 3 steps: grüß [/INST] [b]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\nlearning_rat: 1\n",
            "Unknown setting learning_rat in FILE\n"
            "  Did you mean learning_rate? The settings are: model, out, steps, ",
        ),
        ("zzz: 1\n", "Unknown setting zzz in FILE\n  The settings are: model, out, "),
        (
            "model: m\nbrake:\n  coeficient: 1\n",
            "Unknown setting brake.coeficient in FILE\n  Did you mean brake.coefficient? "
            "The settings are: source, coefficient.",
        ),
        (
            "model: m\nbrake: 3\n",
            "brake in FILE is 3, not a group of settings\n  Its settings are: source, coefficient.",
        ),
        ("model: m\nsteps: 0\n", "--steps is 0\n  Give a value of at least 1."),
        ("model: m\n7: x\n", "Unknown setting 7 in FILE"),
    ],
)
def test_wrong_settings_in_a_file(probe, tmp_path: Path, capsys, text: str, message: str) -> None:
    seen = probe()
    file = write(tmp_path / "a.yaml", text)
    assert cli.main(["probe", "--config", file]) == 2
    shown = capsys.readouterr()
    assert (seen, shown.out) == ([], "")
    assert shown.err.startswith("error " + message.replace("FILE", file))


def test_a_dash_is_as_good_as_an_underscore_in_a_file(probe, tmp_path: Path) -> None:
    seen = probe()
    file = write(tmp_path / "a.yaml", "model: m\nlearning-rate: 0.5\n")
    assert cli.main(["probe", "--config", file]) == 0
    assert seen[0].learning_rate == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe", "--modle", "m"], "Unknown option --modle\n  Did you mean --model? See: rlhf "),
        (["probe", "--model", "m", "--learning", "1"], "Did you mean --learning-rate? See: rlhf"),
        (["probe", "--model", "m", "--brake.sorce", "1"], "Did you mean --brake.source? See: "),
        (["probe", "--model", "m", "--zzz=1"], "Unknown option --zzz\n  See: rlhf probe --help"),
        (["probe"], "--model is missing\n  Type: rlhf probe --model MODEL\n  See: rlhf probe -"),
        (["probe", "--steps", "2"], "  Type: rlhf probe --steps 2 --model MODEL\n"),
        (["probe", "--fast", "dir"], "  Type: rlhf probe --fast --model dir\n"),
        (["probe", "--model"], "--model needs a value\n  For example: --model MODEL. See: rlhf"),
        (["status"], "No run to show\n  Name one: rlhf status runs/NAME\n"),
        (["reference", "--model", "a", "a"], "  Type: rlhf reference --model a --out a\n"),
        (["reference", "--model", "a", "--inspect", "a"], "--model a --inspect --out a\n"),
        (["reference", "--model", "m", "reference"], "--model m --out reference\n"),
        (["reference", "a", "--model", "a"], "  Type: rlhf reference --model a --out a\n"),
        (["reference", "--inspect", "d"], "  Type: rlhf reference --inspect --out d\n"),
        (["ppo", "--keep-lst", "2"], "--keep-lst\n  Did you mean --checkpoint.keep? See: rlhf"),
        (
            ["users", "add"],
            "error --db is missing\n  Type: rlhf users add --db DB\n",
        ),
        (
            ["sft", "--model=m"],
            "error --out is missing\n  Type: rlhf sft --model=m --out OUT\n",
        ),
        (
            ["dpo", "--model=m"],
            "error --out and --rankings are missing\n"
            "  Type: rlhf dpo --model=m --out OUT --rankings RANKINGS\n",
        ),
        (
            ["ppo", "--config", "{model: m, reference: r}"],
            "error --reward and --out are missing\n  Type: rlhf ppo --config ",
        ),
        (["ppo", "--polcy", "2"], "error Unknown option --polcy\n  See: rlhf ppo --help"),
        # named before what the settings themselves find missing
        (
            ["evaluate", "--polcy", "p", "--reward", "r", "--reference", "f", "--out", "o"],
            "Unknown option --polcy\n  Did you mean --policy? See: rlhf evaluate --help",
        ),
        (["evaluate", "--processes", "2"], "Unknown option --processes\n  See: rlhf evaluate"),
        # what other trainers call it
        (["ppo", "--kl_coef", "1"], "option --kl_coef\n  Did you mean --kl.coefficient? See: "),
        (
            ["ppo", "--sampling.max-new-tokens", "9"],
            "option --sampling.max-new-tokens\n  It is that of the reference outputs: "
            "rlhf reference --sampling.max-new-tokens. See: ",
        ),
        (["ppo", "--optim.lr", "1"], "option --optim.lr\n  Did you mean --optim.learning-rate?"),
        (["sft", "--num-train-epochs", "1"], "-train-epochs\n  Did you mean --epochs? See: rlhf"),
        # cyclopts would take it for the group's first setting
        (["ppo", "--lora", "8"], "--lora is a group of settings\n  They are: --lora.rank, --lora."),
        (["train-reward", "--data=x"], "--data is a group of settings\n  Did you mean --rankings?"),
        (["gen"], "Unknown command gen\n  Did you mean generate? See: rlhf --help"),
        (
            ["probe", "--model", "m", "--steps", "few"],
            "error --steps is 'few'\n  Give a whole number. See: rlhf probe --help",
        ),
        (["prope"], "Unknown command"),
        (["probe", "--config", "none.yaml"], "No such settings file: none.yaml"),
    ],
)
def test_wrong_words_on_the_command_line(
    probe, tmp_path: Path, capsys, words: list[str], message: str
) -> None:
    probe()
    words = [write(tmp_path / "a.yaml", word) if word[0] == "{" else word for word in words]
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (InputError("No such thing: [x]", "Look elsewhere."), 2),
        (GuardError("loss is nan", "Lower it."), 3),
        (InterruptedRunError("stopped", "Add --resume."), 75),
        (RlhfError("odd", "Ask."), 1),
    ],
)
def test_our_failures_give_one_message_and_their_code(
    probe, capsys, failure: RlhfError, code: int
) -> None:
    probe(fail=failure)
    assert cli.main(["probe", "--model", "m"]) == code
    shown = capsys.readouterr()
    assert shown.err == f"error {failure.problem}\n  {failure.remedy}\n"
    assert shown.out == ""


def test_a_long_message_is_not_broken_into_lines(probe, capsys) -> None:
    path = "/very/long/" * 30
    probe(fail=InputError(f"No such folder: {path}", "Check it."))
    cli.main(["probe", "--model", "m"])
    assert path in capsys.readouterr().err


def test_an_interrupted_stage_is_resumed(probe, monkeypatch, capsys) -> None:
    probe(fail=KeyboardInterrupt())
    monkeypatch.setattr(
        sys.modules["rlhf.commands.models.generate"].Settings, "resume", False, raising=False
    )
    assert cli.main(["probe", "--model", "m"]) == 75
    assert "with --resume to go on" in capsys.readouterr().err


def test_what_has_written_nothing_is_typed_again(tmp_path: Path) -> None:
    out, again = tmp_path / "out", "Run the same command again."
    tokens = [["ppo", "--out", str(out), "--steps", "2"], ["ppo", f"--out={out}"]]
    assert [cli._how_to_go_on(words) for words in tokens] == [again, again]
    out.mkdir()
    assert cli._how_to_go_on(tokens[0]) == again
    (out / "config.yaml").touch()
    resumed = "Run the same command with --resume to go on."
    assert [cli._how_to_go_on(words) for words in tokens] == [resumed, resumed]
    assert cli._how_to_go_on(["ppo", "--config", "ppo.yaml"]) == resumed  # which may name --out


def test_our_own_bugs_show_their_traceback(probe, capsys) -> None:
    probe(fail=ZeroDivisionError("oh"))
    assert cli.main(["probe", "--model", "m"]) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: oh" in shown
    assert "Please report it" in shown


@pytest.mark.parametrize(("rank", "silent"), [("1", True), ("0", False)])
def test_a_process_left_by_another_lets_that_one_speak(
    probe, monkeypatch, capsys, rank: str, silent: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    probe(fail=RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:19594"))
    assert cli.main(["probe", "--model", "m"]) == 1
    shown = capsys.readouterr().err
    assert (shown == "") is silent
    assert "Traceback" not in shown


SLEEPER = """
import signal, sys, time
from pathlib import Path
from rlhf import cli
from rlhf.run.rundir import RunDir, stage_status
import rlhf.commands.models.generate as command

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def run(settings):
    '''Sleep.'''
    run = RunDir(Path(sys.argv[-1]))
    run.path.mkdir()
    with stage_status(run):
        print("ready", flush=True)
        time.sleep(60)

command.run = run
sys.argv = ["rlhf", "generate", "--db", "d", "--model", sys.argv[-1]]
sys.exit(cli.main())
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_program_exits_with_75_and_says_so_in_its_run(tmp_path: Path, sent: int) -> None:
    out = tmp_path / "out"
    program = subprocess.Popen(
        [sys.executable, "-c", SLEEPER.replace("sys.argv[-1]", repr(str(out)))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    time.sleep(0.1)
    program.send_signal(sent)
    _, shown = program.communicate(timeout=20)
    assert program.returncode == 75, shown
    assert "Run the same command again." in shown
    stage = yaml.safe_load((out / "stage.json").read_text(encoding="utf-8"))
    assert stage["status"] == "interrupted"


def test_a_config_of_another_command_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stage.json").write_text('{"stage": "ppo", "status": "done"}', encoding="utf-8")
    config = tmp_path / "config.yaml"
    config.write_text("steps: 3\n", encoding="utf-8")
    assert cli.main(["train-reward", "--config", str(config)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"Unknown setting steps in {config}, the settings of rlhf ppo" in said


def test_a_dry_run_says_which_inputs_are_not_there_yet(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train-reward", "--rankings", str(tmp_path / "r"), "--model", str(tiny_model)]
    assert cli.main([*words, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert f"# Not there yet: --rankings {tmp_path / 'r'}\n" in capsys.readouterr().out
    assert cli.main([*words, "--out", str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == [f"--rankings {tmp_path / 'r'}"]


def test_a_dry_run_lists_missing_inputs_where_the_memory_cannot_be_planned(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ppo", "--model", str(tiny_model), "--reward", str(tmp_path / "reward")]
    words += ["--out", str(tmp_path / "out"), "--dry-run", "--reference"]
    assert cli.main([*words, str(tmp_path / "reference")]) == 0
    said = capsys.readouterr().out
    assert f"# Not there yet: --reference {tmp_path / 'reference'}\n" in said
    assert f"# Not known while inputs are missing: {tmp_path / 'reward'} is not a model" in said
    (tmp_path / "reference").mkdir()
    assert cli.main([*words, str(tmp_path / "reference")]) == 2
    assert "is not a model" in capsys.readouterr().err
