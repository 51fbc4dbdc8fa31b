"""A stage is done by what it leaves, whatever the command that started it says."""

from pathlib import Path

import pytest

from labeling_app.annotators.rounds import queue_round
from labeling_app.db.store import Store
from rlhf.commands.loop.run import _is_done, _run_round
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.stages import stages_of_round
from rlhf.errors import ConfigError
from rlhf.records.jsonl import write_json
from rlhf.run.loops.commands import read_commands
from rlhf.run.rundir import RunDir
from tests.labeling_app.conftest import build_prompt, build_responses


def test_a_policy_that_was_sampled_under_another_path_is_not_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `--out loop`, and then the same folder by its whole path."""
    monkeypatch.chdir(tmp_path)
    settings = LoopSettings(out=tmp_path / "loop", model="m")
    run = RunDir(settings.out)
    run.path.mkdir()
    [stage] = [one for one in stages_of_round(settings, 1) if one.name == "round"]
    policy = (stage.given["policy"] / "policy").relative_to(tmp_path)
    # as after a database was restored whose copy was older
    write_json(run.commands_file, {"commands": [{"round": 1, "stage": "round", "exit_code": 0}]})
    with Store(settings.database) as store:
        assert not _is_done(run, stage)
        prompt = build_prompt("Which?")
        store.add_prompts([prompt])
        responses = build_responses(prompt, ["one", "two"])
        store.add_responses(responses)
        chosen = [(prompt, responses, "random")]
        queue_round(store, {"policy": {"path": str(policy), "hash": "abc"}}, chosen, {})
    assert _is_done(run, stage)


def test_a_launcher_that_does_not_wait_ends_the_loop_before_the_next_stage(tmp_path: Path) -> None:
    """As `sbatch` without --wait: it would start a stage on what the one before has not made."""
    settings = LoopSettings(out=tmp_path / "loop", model="m", launch="true")
    run = RunDir(settings.out)
    (run.path / "round-0" / "rankings").mkdir(parents=True)
    before = [{"round": 0, "stage": name, "exit_code": 0} for name in ("import", "generate")]
    write_json(run.commands_file, {"commands": before})
    with pytest.raises(ConfigError) as caught:
        _run_round(run, settings, 0)
    assert caught.value.problem.startswith("train-reward of round 0 is not done")
    assert "--launch must wait for the command" in caught.value.remedy
    assert [entry["stage"] for entry in read_commands(run)][2:] == ["train-reward"]
