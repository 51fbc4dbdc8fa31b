"""The loop looks for prompts of every split before it trains anything."""

from dataclasses import replace
from pathlib import Path

import pytest

from labeling_app.db.store import Store
from rlhf.commands.loop.run import run_rounds
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.splits import require_splits
from rlhf.errors import InputError
from rlhf.run.rundir import RunDir
from tests.labeling_app.conftest import build_prompt

PROMPTS = [build_prompt(f"Question {n}?") for n in range(3)]


def test_prompts_of_every_split_are_required_before_the_first_stage(tmp_path: Path) -> None:
    settings = LoopSettings(out=tmp_path, model="m")
    with Store(settings.database) as store:
        store.add_prompts(PROMPTS)
    with pytest.raises(InputError) as caught:
        require_splits(settings)
    assert str(caught.value) == (
        f"{tmp_path}/labels.db has no prompts of the split 'test', which the evaluation compares "
        "the policies on\n"
        "  Upload some on the Data page with the split test, or type: rlhf import prompts.jsonl "
        f"--split test --db {tmp_path}/labels.db, or set stages: evaluate: split: train in the "
        "file.\n  Then start the loop again."
    )
    require_splits(replace(settings, stages={"evaluate": {"split": "train"}}))
    with Store(settings.database) as store:
        store.add_prompts([replace(build_prompt("Another?"), split="test")])
    require_splits(settings)
    only_test = LoopSettings(out=tmp_path / "other", model="m")
    only_test.out.mkdir()
    with Store(only_test.database) as store:
        store.add_prompts([replace(build_prompt("Another?"), split="test")])
    with pytest.raises(InputError, match="has no prompts of the split 'train', which the policy"):
        require_splits(only_test)


def test_the_loop_runs_no_stage_without_them_and_goes_on_when_they_are_there(
    tmp_path: Path,
) -> None:
    settings = LoopSettings(out=tmp_path / "out", model="no such model", db=tmp_path / "labels.db")
    with Store(settings.database) as store:
        store.add_prompts(PROMPTS)
    with pytest.raises(InputError, match="has no prompts of the split 'test'"):
        run_rounds(settings)
    run = RunDir(settings.out)
    assert not run.commands_file.exists()
    error = run.read_stage()["error"]
    assert error.startswith(f"InputError: {tmp_path}/labels.db has no prompts of the split 'test'")
