"""The file of `rlhf loop`: what is refused, and the commands that it stands for."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlhf.cli import main
from rlhf.config import load_settings
from tests.servers.commands import REPOSITORY

Refused = Callable[..., str]
TOP = "out: runs/a\nmodel: m\nprompts: p.jsonl\n"
SIGNAL = "signal:tests.pipeline.signals:count_vowels"
ROUND_0 = """\
rlhf import p.jsonl --db runs/a/labels.db
rlhf generate --config runs/a/round-0/settings/generate.yaml --db runs/a/labels.db --model m
rlhf annotate --db runs/a/labels.db --annotator SIGNAL
rlhf export --db runs/a/labels.db --out runs/a/round-0/rankings --kind signal
rlhf train-reward --rankings runs/a/round-0/rankings --model m --out runs/a/round-0/reward --resume
rlhf reference --prompts runs/a/round-0/rankings --model m --reward runs/a/round-0/reward \
--out runs/a/round-0/reference --resume
rlhf ppo --config runs/a/round-0/settings/ppo.yaml --model m --reward runs/a/round-0/reward \
--reference runs/a/round-0/reference --out runs/a/round-0/ppo --resume
rlhf evaluate --policy runs/a/round-0/ppo --reference runs/a/round-0/reference \
--reward runs/a/round-0/reward --out runs/a/round-0/evaluate --resume --gold SIGNAL"""
ROUND_1 = """\
rlhf round --db runs/a/labels.db --policy runs/a/round-0/ppo --reference runs/a/round-0/reference \
--reward runs/a/round-0/reward
rlhf annotate --db runs/a/labels.db --annotator SIGNAL
rlhf export --db runs/a/labels.db --out runs/a/round-1/rankings --kind signal
rlhf train-reward --rankings runs/a/round-1/rankings --model m --out runs/a/round-1/reward --resume
rlhf reference --prompts runs/a/round-1/rankings --model runs/a/round-0/ppo/policy \
--reward runs/a/round-1/reward --out runs/a/round-1/reference --resume
rlhf ppo --config runs/a/round-1/settings/ppo.yaml --model runs/a/round-0/ppo/policy \
--reward runs/a/round-1/reward --reference runs/a/round-1/reference --out runs/a/round-1/ppo \
--resume
rlhf evaluate --policy runs/a/round-1/ppo --reference runs/a/round-0/reference \
--reward runs/a/round-1/reward --out runs/a/round-1/evaluate --against runs/a/round-0/ppo \
--resume --gold SIGNAL"""


@pytest.fixture
def loop_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "loop.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def dry_run(file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, list[str]]:
    """The settings that a dry run prints, and the lines of the commands."""
    assert main(["loop", "--config", str(file), "--dry-run", *more]) == 0
    settings, _, commands = capsys.readouterr().out.partition("\n\n")
    return settings, [line.removeprefix("#").strip() for line in commands.splitlines()]


def test_a_dry_run_prints_the_commands_of_the_first_and_of_a_later_round(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sections = "stages:\n  generate: {k: 4}\n  ppo: {steps: 3, processes: 2}\n  export:\n"
    _, lines = dry_run(loop_file(f"{TOP}annotator: {SIGNAL}\n{sections}"), capsys)
    later = lines.index("Round 1, and later ones alike:")
    assert lines[:later] == ["Round 0:", *ROUND_0.replace("SIGNAL", SIGNAL).splitlines()]
    assert lines[later + 1 :] == ROUND_1.replace("SIGNAL", SIGNAL).splitlines()


def test_people_rank_before_the_export_and_as_many_tasks_are_queued_as_are_waited_for(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, lines = dry_run(loop_file("out: runs/a\nmodel: m\ndb: l.db\nnew_rankings: 7\n"), capsys)
    assert [line.partition(" --")[0] for line in lines[1:4]] == [
        "rlhf generate",
        "(people rank, until there are 7 new rankings)",
        "rlhf export",
    ]
    assert lines[3] == "rlhf export --db l.db --out runs/a/round-0/rankings --kind human"
    assert "--gold" not in lines[7]
    assert next(line for line in lines if line.startswith("rlhf round")).endswith("--pick 7")


@pytest.mark.parametrize(
    ("lines", "until"),
    [
        ("start_at: '02:00'", "there are 100 new rankings or the time comes (02:00)"),
        ("start_at: every 6 hours\nnew_rankings:", "the time comes (every 6 hours)"),
    ],
)
def test_a_round_may_start_at_a_time(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str], lines: str, until: str
) -> None:
    _, printed = dry_run(loop_file(f"{TOP}{lines}\n"), capsys)
    assert f"(people rank, until {until})" in printed
    pick = "--pick" in next(line for line in printed if line.startswith("rlhf round"))
    assert pick is ("100" in until)


def test_words_of_launch_stand_before_commands_that_leave_the_database_alone(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    launch = "launch: srun --comment 'a b'\n"
    _, lines = dry_run(loop_file(f"{TOP}annotator: {SIGNAL}\n{launch}"), capsys)
    first = [line.partition(" --")[0] for line in lines[1:9]]
    here = ["rlhf import p.jsonl", "rlhf generate", "rlhf annotate", "rlhf export"]
    assert first == [*here, *["srun"] * 4]
    names = [line.partition(" --comment 'a b' ")[2].split(" ")[:2] for line in lines[5:9]]
    assert names == [["rlhf", one] for one in ("train-reward", "reference", "ppo", "evaluate")]


def test_what_ranks_at_once_waits_for_no_number(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(loop_file(f"{TOP}annotator: {SIGNAL}\nnew_rankings: none\n"), capsys)


def test_a_section_decides_what_the_loop_only_suggests(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sections = "stages:\n  export: {kind: [human, signal]}\n  evaluate: {gold: signal:a:b}\n"
    _, lines = dry_run(loop_file(f"{TOP}annotator: {SIGNAL}\n{sections}"), capsys)
    assert not any("--kind" in line or "--gold" in line for line in lines)
    judge = "annotator: judge\nstages:\n  annotate: {endpoint: 'http://a/v1', model: m}\n"
    _, lines = dry_run(loop_file(f"{TOP}{judge}"), capsys)
    assert lines[4].endswith("--kind ai")


def test_the_file_in_the_guide(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "examples" / "guides" / "commands.md").read_text("utf-8")
    [text] = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    settings, lines = dry_run(loop_file(text), capsys)
    assert yaml.safe_load(settings)["stages"] == {"ppo": {"steps": 200}}
    assert "(people rank, until there are 100 new rankings)" in lines


def test_what_a_dry_run_prints_can_be_read_back(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old = "stages:\n  train_reward: {learning-rate: 1e-4}\n  ppo: {kl: {audit_every: 0}}\n"
    printed, lines = dry_run(loop_file(TOP + old), capsys, "--rounds", "9")
    assert yaml.safe_load(printed)["stages"] == {
        "train-reward": {"optim": {"learning_rate": "1e-4"}},
        "ppo": {"kl": {"audit_every": None}},
    }
    assert yaml.safe_load(printed)["rounds"] == 9
    assert dry_run(loop_file(printed), capsys) == (printed, lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round: 3", "Unknown setting round in FILE Did you mean rounds? The settings are: out, "),
        ("annotator: ann", "--annotator is 'ann' Write people, judge, or signal:package.module:"),
        ("rounds: 0", "--rounds is 0 Give a value of at least 1."),
        ("new_rankings: none", "--new-rankings is none, and there is no --start-at Give one of"),
        ("start_at: 12:30", "--start-at is '750' Give a time of day in quotation marks, such as"),
        (
            "start_at: '02:00'\nannotator: signal:a:b",
            "--start-at has no effect with signal:a:b, which ranks at once Leave it out.",
        ),
        ("launch: srun 'a", '--launch is "srun \'a" (No closing quotation) Write it as in a shell'),
        ("launch: ''", "--launch is empty Give words such as"),
        (
            "launch: no-such-program -x",
            "--launch starts 'no-such-program', and there is no such program here Check the word",
        ),
        (
            "launch: env\nstages: {evaluate: {to_db: l.db}}",
            "stages.evaluate.to_db cannot be used with --launch: what it starts leaves the",
        ),
        ("notify: chat", "--notify is 'chat' Give a URL that starts with http:// or https://."),
        (
            "stages: {pro: {}}",
            "Unknown section stages.pro in FILE Did you mean stages.ppo? The sections are: import,",
        ),
        (
            "stages: {ppo: {optim: {learning_rat: 1}}}",
            "Unknown setting stages.ppo.optim.learning_rat in FILE Did you mean "
            "stages.ppo.optim.learning_rate? The settings are: learning_rate, epochs, ",
        ),
        (
            "stages: {ppo: {stepps: 1}}",
            "Unknown setting stages.ppo.stepps in FILE Did you mean stages.ppo.steps?",
        ),
        ("stages: {ppo: 3}", "stages.ppo in FILE is 3, not a group of settings Its settings are: "),
        ("stages: 3", "stages in FILE is 3, not a group of settings Its settings are: import, gen"),
        (
            "stages: {ppo: {optim: {learning_rate: -1}}}",
            "stages.ppo: --optim.learning-rate is -1 Give a value of more than 0.",
        ),
        ("stages: {generate: {k: few}}", "k is 'few' in stages.generate Give a whole number."),
        ("stages: {ppo: {model: m}}", "rlhf loop sets stages.ppo.model itself Delete the line."),
        ("stages: {evaluate: {against: m}}", "rlhf loop sets stages.evaluate.against itself"),
        ("stages: {reference: {shard: 1/2}}", "stages.reference.shard cannot be used in a loop"),
        (
            "stages: {ppo: {notify: 'http://a'}}",
            "stages.ppo.notify is set for one stage Set notify at the top of the file, for the ",
        ),
        (
            "stages: {annotate: {parallel: 2}}",
            "stages.annotate has no effect with people Delete the section.",
        ),
        (
            "annotator: judge",
            "stages.annotate: A judge needs --endpoint (is ''), --model (is '') For example: ",
        ),
    ],
)
def test_settings_are_refused_before_anything_runs(
    loop_file: Callable[[str], Path],
    refused: Refused,
    tmp_path: Path,
    text: str,
    message: str,
) -> None:
    out = tmp_path / "loop"
    file = loop_file(f"out: {out}\nmodel: m\n{text}\n")
    said = refused("loop", "--config", file)
    assert message.replace("FILE", str(file)) in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("3", "--stages is '3', not a JSON object For example: --stages '{\"ppo\": {\"steps"),
        ('{"ppo": {"stepps": 2}}', "Unknown setting stages.ppo.stepps in --stages Did you mean"),
    ],
)
def test_sections_on_the_command_line(
    loop_file: Callable[[str], Path], refused: Refused, word: str, message: str
) -> None:
    assert message in refused("loop", "--config", loop_file(TOP), "--stages", word)


def test_an_import_needs_files(loop_file: Callable[[str], Path], refused: Refused) -> None:
    file = loop_file("out: a\nmodel: m\nstages: {import: {split: test}}\n")
    assert "stages.import has no effect without prompts" in refused("loop", "--config", file)


def test_one_process_runs_the_loop(
    loop_file: Callable[[str], Path], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refused("loop", "--config", loop_file(TOP))
    assert "2 processes were started" in said
    assert "set processes in the section of a stage" in said


def test_one_seed_is_that_of_every_stage_without_its_own(
    loop_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = loop_file(f"{TOP}annotator: {SIGNAL}\nseed: 7\nstages: {{ppo: {{seed: 3}}}}\n")
    _, commands = dry_run(file, capsys)
    seeded = {line.split()[1] for line in commands if "--seed 7" in line}
    assert seeded == {"generate", "round", "train-reward", "reference", "evaluate"}
    assert not any("--seed 3" in line for line in commands)  # it is in the file of its section


def test_the_example_has_the_settings_of_the_quickstart() -> None:
    examples = REPOSITORY / "examples"
    stages = yaml.safe_load((examples / "rounds" / "loop.yaml").read_text("utf-8"))["stages"]
    assert stages.pop("round") == {"pick": 64}
    files = [examples / "quickstart" / name for name in ("loop.yaml", "signal.yaml")]
    assert stages == load_settings(files)["stages"]


def test_the_demo_of_earlier_versions_has_the_settings_of_its_commands() -> None:
    folder = REPOSITORY / "examples" / "evidence" / "primed"
    stages = load_settings([folder / "loop.yaml"])["stages"]
    assert (stages["ppo"].pop("steps"), stages.pop("annotate")) == (16, {"tie_within": 0.4})
    names = {"generate": "generate", "train-reward": "reward", "reference": "reference"}
    for stage, name in {**names, "ppo": "ppo"}.items():
        assert stages.pop(stage) == load_settings([folder / f"{name}.yaml"]), stage
    assert not stages
