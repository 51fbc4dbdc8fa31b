"""Settings files and files of runs, broken as people meet them: exit 2 and one message."""

import json
import time
from pathlib import Path

import pytest

from rlhf import cli
from rlhf.config import MAX_YAML_BYTES, load_settings
from rlhf.errors import ConfigError, InputError
from rlhf.run.rundir import open_stage, stage_status
from tests.trust.stages import METRICS, REPORT, Stage

BOMB = "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
RECURSIVE = "a: &a\n  b: *a\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"note: caf\xe9\n", "is not UTF-8 text (invalid continuation byte at byte 9)"),
        (b"out: 2026-13-45\n", "is not valid YAML: month must be in 1..12"),
        (b"rate: !!float fast\n", "is not valid YAML: could not convert string to float: 'fast'"),
        (b"rate: !!int 1_x\n", "is not valid YAML: invalid literal for int()"),
        (b"note: !!binary aGk=\n", "is not valid YAML: a bytes cannot be a setting"),
        (b"note: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        (b"seed: 0x" + b"f" * 5000, "is not valid YAML: Exceeds the limit"),
        (b"seed: " + b"9" * 5000, "is not valid YAML: Exceeds the limit"),
        (b"a: " + b"[" * 500, "more than 20 levels or 10,000 values"),
        (b"a: " + b"{a: " * 9000, "more than 20 levels or 10,000 values"),
        (b"- " * 30000, "more than 20 levels or 10,000 values"),
        (RECURSIVE.encode(), "more than 20 levels or 10,000 values"),
        (("a: &a [x]\n" + BOMB).encode(), "more than 20 levels or 10,000 values"),
        (b"a: b\n" * 30000, f"more than {MAX_YAML_BYTES:,} bytes"),
        (b"a: b\n---\nc: d\n", "expected a single document"),
        (b"a: \x07\n", "special characters are not allowed"),
        (b"? [a]\n: b\n", "found unhashable key"),
    ],
)
def test_a_settings_file_is_refused_at_once(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        load_settings([file])
    assert time.monotonic() - began < 5
    assert caught.value.problem.startswith(f"{file} ")
    assert words in caught.value.problem


def test_names_and_dates_of_a_settings_file_are_what_they_stand_for(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n  y: 2\nout: 2026-01-02\n")
    found = load_settings([file])
    assert found == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}, "out": "2026-01-02"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("stage.json", b"", "not valid JSON (Expecting value at column 1)"),
        ("stage.json", b"\xff\xfe", "cannot be read ('utf-8' codec can't decode"),
        ("stage.json", b"[]", "expected a JSON object, found list"),
        ("stage.json", b"{}", "has no 'stage'"),
        ("stage.json", b'{"stage": "ppo"}', "has no 'status'"),
        ("stage.json", b'{"stage": 3, "status": "done"}', "has 'stage' as '3', not as str"),
        ("stage.json", b'{"inputs": ["a"]}', "has 'inputs' as "),
        ("stage.json", b'{"inputs": {"a": 1}}', "(input a) has 'a' as '1', not as dict"),
        ("stage.json", b'{"started_at": "yesterday"}', "has 'yesterday' in place of a date"),
        ("stage.json", b'{"started_at": "2026-01-01"}', "has '2026-01-01' in place of a date"),
        ("stage.json", b'{"a":' * 3000, "nested more than 64 deep"),
        ("config.yaml", b"a: [", "is not valid YAML"),
        ("config.yaml", b"- a", "holds a list, not settings"),
        ("config.yaml", b"\xe9", "is not UTF-8 text"),
        ("metrics.jsonl", b"{}\n[1]\n", "metrics.jsonl:2: expected a JSON object, found list"),
        ("metrics.jsonl", b"\xe9\n", "is not UTF-8 text"),
        ("report.json", b"", "not valid JSON"),
        ("report.json", b'{"verdict": {"judge": "gold"}}', "has no 'win_rate.gold.value'"),
        ("report.json", b'{"accuracy": {"value": "high"}}', "has 'accuracy.value' as 'high'"),
        ("report.json", b'{"a": "\\ud800"}', "half a character"),
    ],
)
def test_a_broken_file_of_a_run_is_named(
    tmp_path: Path, name: str, content: bytes, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = open_stage(tmp_path / "ppo", "ppo", Stage(Path("out")), {}, resume=False)
    with stage_status(run):
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in METRICS))
        run.report_json.write_text(json.dumps(REPORT))
    (run.path / name).write_bytes(content)
    assert cli.main(["status", str(run.path)]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error ")
    assert f"{run.path / name}" in said
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize("report", [{}, {"verdict": 3}, {"win_rate": {"gold": "high"}}, {"a": [1]}])
def test_a_broken_report_of_an_evaluation_is_named(
    tmp_path: Path, report: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    run = open_stage(tmp_path / "evaluate", "evaluate", Stage(Path("out")), {}, resume=False)
    with stage_status(run):
        run.answers.touch()
        run.report_json.write_text(json.dumps(report))
    arguments = ["evaluate", "--out", str(run.path), "--to-db", str(tmp_path / "labels.db")]
    assert cli.main(arguments) == 2
    said = capfd.readouterr().err
    assert str(run.report_json) in said
    assert "Traceback" not in said


def test_votes_are_described_from_a_whole_report_only(tmp_path: Path) -> None:
    run = open_stage(tmp_path / "evaluate", "evaluate", Stage(Path("out")), {}, resume=False)
    run.report_json.write_text(json.dumps({"samples_per_prompt": "two"}))
    words = "is not what its stage writes"
    with pytest.raises(InputError, match=words), run.reading_report():
        run.read_report()["samples_per_prompt"] / 2
