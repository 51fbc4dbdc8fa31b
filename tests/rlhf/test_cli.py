import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import yaml

from rlhf import __version__, cli
from rlhf.config import require_range
from rlhf.errors import GuardError, InputError, InterruptedRunError, RlhfError

RESULT = {
    "steps": 3,
    "kl": {"nats": 0.12345678},
    "text": "grüß [/INST] [b]",
    "of": [{"model": "a"}, {"model": "b"}],
    "skipped": [],
}


@dataclass(frozen=True, kw_only=True)
class Brake:
    """A group of settings."""

    source: str = "reference"
    """Where it comes from."""
    coefficient: float = 0.1
    """How strong it is."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a command that only this test knows."""

    model: str
    """Model folder or hub name."""
    out: Path = Path("runs/a")
    """Folder of this stage."""
    steps: int = 3
    """How many steps."""
    learning_rate: float = 3e-6
    """Peak learning rate."""
    tags: tuple[str, ...] = ()
    """Words."""
    note: str | None = None
    """A remark."""
    fast: bool = False
    """Whether to hurry."""
    brake: Brake = field(default_factory=Brake)
    """The brake."""

    def __post_init__(self) -> None:
        require_range("steps", self.steps, 1)


def _command(run: Callable[[Settings], dict[str, Any]], plan: str = "") -> ModuleType:
    module = ModuleType("rlhf.commands.models.generate")
    module.Settings = Settings
    module.run = run
    module.describe = lambda settings, result: f"Did {result['steps']} steps: {result['text']}"
    module.EXAMPLE = "rlhf probe --model m"
    if plan:
        module.memory_plan = lambda settings: plan
    return module


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Settings]]:
    """Puts a command `probe` beside the real ones; gives the settings that it ran with."""

    def install(fail: BaseException | None = None, plan: str = "") -> list[Settings]:
        seen: list[Settings] = []

        def run(settings: Settings) -> dict[str, Any]:
            """Do what this test wants."""
            seen.append(settings)
            if fail is not None:
                raise fail
            return RESULT | {"steps": settings.steps}

        monkeypatch.setitem(sys.modules, "rlhf.commands.models.generate", _command(run, plan))
        monkeypatch.setitem(cli.COMMANDS, "probe", "models.generate")
        return seen

    return install


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


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
