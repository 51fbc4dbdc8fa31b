"""Prompts without responses that come while a round waits, with `rlhf generate` as it is."""

import shlex
from pathlib import Path

import pytest

from labeling_app.db.imports.unfinished import importing
from labeling_app.db.store import Store
from rlhf.commands.loop.new_prompts import NewPrompts
from rlhf.commands.loop.settings import LoopSettings
from rlhf.run.loops.commands import read_commands
from rlhf.run.loops.pausing import end_pause, request_pause
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import read_heartbeats
from tests.labeling_app.conftest import build_prompt, build_responses

GENERATE = {"k": 2, "max_new_tokens": 4, "precision": "fp32"}
OLD, NEW, HIDDEN = (build_prompt(f"{word}?") for word in ("Old", "New", "Hidden"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A loop whose database has one prompt, with responses."""
    run = RunDir(tmp_path / "loop")
    run.path.mkdir()
    with Store(run.path / "labels.db") as store:
        store.add_prompts([OLD])
        store.add_responses(build_responses(OLD, ["one", "two"]))
    return run


def not_ready() -> bool:
    return False


def new_prompts(run: RunDir, model: Path, number: int) -> NewPrompts:
    settings = LoopSettings(
        out=run.path, model=str(model), new_rankings=5, stages={"generate": GENERATE}
    )
    return NewPrompts(run, settings, number)


def test_they_get_responses_of_the_first_model_also_in_a_later_round(
    run: RunDir, tiny_model: Path
) -> None:
    new = new_prompts(run, tiny_model, 3)
    new.sample_responses(not_ready)
    assert read_commands(run) == []  # nothing is new
    with Store(run.path / "labels.db") as store:
        with importing(store.connections, "in.jsonl") as current:
            store.add_prompts([HIDDEN], import_id=current.id)
            for looking in (new, new_prompts(run, tiny_model, 3)):
                looking.sample_responses(not_ready)
            assert read_commands(run) == []  # the import is not finished
        store.add_prompts([NEW])
        new.sample_responses(not_ready)
        [entry] = read_commands(run)
        assert (entry["round"], entry["stage"], entry["exit_code"]) == (3, "generate", 0)
        [beat] = read_heartbeats(run.path / "round-3" / "generate" / "heartbeat")
        assert beat.phase == "sampling responses"  # whose count the Runs page shows
        for prompt in (NEW, HIDDEN):
            assert [one.model for one in store.responses(prompt.id)] == [str(tiny_model)] * 2
        assert len(store.responses(OLD.id)) == 2  # those it was imported with
        assert store.counts()["open"] == 3
    new.sample_responses(not_ready)
    assert len(read_commands(run)) == 1


def test_where_sampling_fails_the_round_waits_on(
    run: RunDir, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    new = new_prompts(run, tmp_path / "no model", 0)
    with Store(run.path / "labels.db") as store:
        store.add_prompts([NEW])
    new.sample_responses(not_ready)
    said = capfd.readouterr().err
    [entry] = read_commands(run)
    assert said.endswith(
        "rlhf generate of round 0 ended with exit code 2. "
        "The round waits on, but new prompts have no responses.\n"
        f"  Sample them by itself: {shlex.join(entry['command'])}\n"
    )
    new.sample_responses(not_ready)
    assert len(read_commands(run)) == 1  # until there are other prompts


def test_what_a_pause_stops_begins_again(run: RunDir, tiny_model: Path) -> None:
    new = new_prompts(run, tiny_model, 0)
    with Store(run.path / "labels.db") as store:
        store.add_prompts([NEW])
    request_pause(run.path, "lea", stops_stage=True)
    new.sample_responses(not_ready)
    assert [one["exit_code"] == 0 for one in read_commands(run)] == [False]
    end_pause(run.path)
    new.sample_responses(not_ready)
    assert [one["exit_code"] == 0 for one in read_commands(run)] == [False, True]


def test_a_round_that_can_begin_ends_it_but_none_begins_in_a_pause(
    run: RunDir, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    new, looks = new_prompts(run, tiny_model, 0), list[str]()
    with Store(run.path / "labels.db") as store:
        store.add_prompts([NEW])

    def is_ready() -> bool:
        looks.append("")
        return True

    new.sample_responses(is_ready)
    said = "The round can begin: waiting for the command to save its state and end.\n"
    assert capfd.readouterr().err.count(said) == 1
    assert len(looks) == 1
    request_pause(run.path, "lea")  # which lets the command end
    new.sample_responses(is_ready)
    assert len(looks) == 1
    assert [one["exit_code"] == 0 for one in read_commands(run)] == [False, True]
