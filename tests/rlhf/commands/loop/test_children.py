"""The commands of a round as child processes: their settings, what is kept, how they end."""

import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from labeling_app.db.store import Store
from rlhf.commands.loop.children import StageFailedError, run_stage
from rlhf.commands.loop.stages import Stage
from rlhf.errors import InterruptedRunError
from rlhf.run.loops.commands import read_commands
from rlhf.run.loops.pausing import read_pause, request_pause
from rlhf.run.rundir import RunDir
from tests.labeling_app.conftest import build_prompt, build_responses
from tests.pipeline.loop import write_prompts

DIE = "signal:tests.pipeline.signals:count_or_die"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "loop").mkdir()
    return RunDir(tmp_path / "loop")


def stage(run: RunDir, name: str, section: dict[str, Any] | None = None, **given: Any) -> Stage:
    folder = run.path / "round-0"
    return Stage(number=0, name=name, given=given, section=section or {}, folder=folder)


def test_a_command_has_the_settings_of_its_section_and_those_of_the_loop(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    db = run.path / "labels.db"
    prompts = write_prompts(run.path / "my prompts.jsonl")
    section = {"source": "mine; rm -r /"}  # no shell reads it
    here = stage(run, "import", section, files=(prompts,), db=db)
    run_stage(run, here, newest=7)
    with Store(db) as store:
        assert len(store.prompts()) == 12
        assert {prompt.source for prompt in store.prompts()} == {"mine; rm -r /"}
    [entry] = read_commands(run)
    file = run.path / "round-0" / "settings" / "import.yaml"
    words = ["import", str(prompts), "--config", str(file), "--db", str(db)]
    assert entry["command"] == ["rlhf", *words]
    assert (entry["round"], entry["stage"], entry["exit_code"]) == (0, "import", 0)
    assert entry["newest"] == 7
    assert entry["seconds"] > 0
    shown = capfd.readouterr()
    assert shown.out == ""
    quoted = f"'{prompts}'"
    assert shown.err.startswith(
        f"\nRound 0: rlhf import {quoted} --config {file} --db {db}\nImported 12 prompts.\n"
    )


def test_the_exit_code_of_a_command_that_fails_is_that_of_the_loop(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StageFailedError) as caught:
        run_stage(run, stage(run, "import", files=("none.jsonl",), db=run.path / "labels.db"))
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "rlhf import of round 0 ended with exit code 2\n"
        f"  Repeat it by itself: rlhf import none.jsonl --db {run.path}/labels.db\n"
        "  Then type the command of the loop again."
    )
    assert "error No such file: none.jsonl" in capfd.readouterr().err
    assert [entry["exit_code"] for entry in read_commands(run)] == [2]


def test_a_killed_command_may_go_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    db, prompt = run.path / "labels.db", build_prompt("How?")
    with Store(db) as store:
        store.add_prompts([prompt])
        store.add_responses(build_responses(prompt, ["one", "two"]))
    monkeypatch.setenv("KILL_AT", "How")
    with pytest.raises(InterruptedRunError) as caught:
        run_stage(run, stage(run, "annotate", db=db, annotator=DIE))
    assert str(caught.value) == (
        "rlhf annotate of round 0 was killed by SIGKILL\n"
        "  Type the command of the loop again to go on. If memory ran out, use smaller batches."
    )
    monkeypatch.delenv("KILL_AT")
    run_stage(run, stage(run, "annotate", db=db, annotator=DIE))
    assert [entry["exit_code"] for entry in read_commands(run)] == [-9, 0]


def test_words_of_launch_stand_before_the_command_and_no_shell_reads_them(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "my launcher.sh"
    launcher.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nshift\nexec "$@"\n')
    launcher.chmod(0o700)
    prompts = write_prompts(run.path / "prompts.jsonl")
    here = stage(run, "import", files=(prompts,), db=run.path / "labels.db")
    assert run_stage(run, here, [str(launcher), "$HOME; ls"])
    first, program, module, cli, *words = (tmp_path / "words").read_text().splitlines()
    assert (first, program) == ("$HOME; ls", sys.executable)
    assert (module, cli, words) == ("-m", "rlhf.cli", here.arguments)
    assert [entry["exit_code"] for entry in read_commands(run)] == [0]
    assert f"Round 0: '{launcher}' '$HOME; ls' rlhf import {prompts}" in capfd.readouterr().err


def test_a_look_that_fails_ends_the_running_command(run: RunDir) -> None:
    db, prompts = run.path / "labels.db", [build_prompt(f"How is {n}?") for n in range(40)]
    with Store(db) as store:
        store.add_prompts(prompts)
        store.add_responses(r for p in prompts for r in build_responses(p, ["one", "two"]))
    annotate = stage(run, "annotate", db=db, annotator="signal:tests.pipeline.signals:count_slowly")

    def fail() -> bool:
        raise InterruptedRunError("The disk is full", "Free some of it.")

    began = time.monotonic()
    with pytest.raises(InterruptedRunError, match="The disk is full"):
        run_stage(run, annotate, is_over=fail)
    assert time.monotonic() - began < 30  # forty prompts would take forty seconds
    [entry] = read_commands(run)
    assert entry["exit_code"] in (75, -15, -2)  # -15 and -2: before the command can save its state


def test_a_pause_can_stop_the_running_command_which_then_has_to_run_again(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    db, prompts = run.path / "labels.db", [build_prompt(f"How is {n}?") for n in range(40)]
    with Store(db) as store:
        store.add_prompts(prompts)
        store.add_responses(r for p in prompts for r in build_responses(p, ["one", "two"]))
    annotate = stage(run, "annotate", db=db, annotator="signal:tests.pipeline.signals:count_slowly")

    def ask(**how: bool) -> None:
        while not (run.path / ".child").exists():
            time.sleep(0.05)
        time.sleep(2)
        request_pause(run.path, "lea", **how)

    asking = Thread(target=ask, kwargs={"stops_stage": True})
    asking.start()
    began = time.monotonic()
    assert not run_stage(run, annotate)
    asking.join()
    assert time.monotonic() - began < 30  # forty prompts would take forty seconds
    [entry] = read_commands(run)
    assert entry["exit_code"] in (75, -15)  # -15: before the command can take signals
    assert "Paused by lea: waiting for the command to save its state" in capfd.readouterr().err
    assert read_pause(run.path) is not None  # until somebody resumes


def test_a_pause_lets_the_running_command_end(run: RunDir) -> None:
    request_pause(run.path, "lea")
    prompts = write_prompts(run.path / "prompts.jsonl")
    assert run_stage(run, stage(run, "import", files=(prompts,), db=run.path / "labels.db"))
