"""Which commands of a round are done, by what they left."""

from pathlib import Path

from labeling_app.db.store import Store
from rlhf.commands.loop.run import _is_done
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.stages import stages_of_round
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir


def test_a_policy_that_was_sampled_under_another_path_is_not_sampled_again(tmp_path: Path) -> None:
    """As after `--out runs/loop`, and then the same folder by its whole path."""
    settings = LoopSettings(out=tmp_path, model="m")
    run = RunDir(tmp_path)
    with Store(settings.database):
        pass
    [stage] = [one for one in stages_of_round(settings, 1) if one.name == "round"]
    assert not _is_done(run, stage)
    entry = {"round": 1, "stage": "round", "exit_code": 75}
    write_json(run.commands_file, {"commands": [entry]})
    assert not _is_done(run, stage)
    write_json(run.commands_file, {"commands": [entry, entry | {"exit_code": 0}]})
    assert _is_done(run, stage)
