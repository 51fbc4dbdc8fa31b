import re
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.dpo.settings import DPOSettings
from policies.evaluate.settings import EvaluateSettings
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from policies.reference.settings import ReferenceSettings
from policies.sft.settings import SFTSettings
from rlhf.config import flatten, read_settings_file
from rlhf.config.paths import with_changes
from rlhf.errors import InputError, InterruptedRunError
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir, open_stage, require_done, stage_status
from tests.settings import changed, ppo_settings, reward_settings

INPUTS = {"model": {"path": "m", "hash": "abc"}}


@dataclass(frozen=True, kw_only=True)
class Settings:
    out: Path
    seed: int = 3
    steps: int = 10
    rate: float = 3e-6
    files: tuple[str, ...] = ("a",)
    resume: bool = False
    notify: str = ""
    shard: str | None = None


def open_ppo(
    out: Path, inputs: dict[str, dict[str, str]] = INPUTS, resume: bool = False, **changes: Any
) -> RunDir:
    settings = Settings(out=out, resume=resume, **changes)
    return open_stage(out, "ppo", settings, inputs, resume=resume)


def finish(run: RunDir) -> None:
    with stage_status(run):
        run.policy.mkdir()


def test_a_stage_starts_beside_files_that_it_knows_of(tmp_path: Path) -> None:
    (tmp_path / "labels.db").touch()
    settings, known = Settings(out=tmp_path), {"labels.db", "loop.log"}
    with pytest.raises(InputError, match=r"already exists \(not a run folder\)"):
        open_stage(tmp_path, "loop", settings, {}, resume=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"exists but is not a run folder \(no config.yaml\)"):
        open_stage(tmp_path, "loop", settings, {}, resume=True, beside=known)
    (tmp_path / "notes.txt").unlink()
    run = open_stage(tmp_path, "loop", settings, {}, resume=True, beside=known)
    assert run.read_stage()["status"] == "running"


def test_the_key_to_a_chat_stays_out_of_the_files(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "run", notify="https://hooks.example/secret")
    assert "notify: null" in run.config_file.read_text(encoding="utf-8")
    assert "hooks.example" not in run.stage_file.read_text(encoding="utf-8")
    open_ppo(tmp_path / "run", notify="https://hooks.example/secret", resume=True)


def test_a_new_stage_records_what_it_is(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "runs" / "ppo")
    stage = run.read_stage()
    assert (stage["stage"], stage["status"], stage["seed"]) == ("ppo", "running", 3)
    assert stage["inputs"] == INPUTS
    assert stage["versions"]["torch"].startswith("2.")
    assert stage["hardware"]["cpus"] >= 1
    assert stage["started_at"].endswith("+00:00")
    assert "steps: 10" in run.config_file.read_text(encoding="utf-8")
    assert not run.is_done


def test_how_a_stage_ended(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")

    def end(error: BaseException) -> None:
        with stage_status(run):
            raise error

    for error, status in ((KeyboardInterrupt(), "interrupted"),
                          (InterruptedRunError("stopped", "go on"), "interrupted"),
                          (ValueError("oh"), "failed")):  # fmt: skip
        with pytest.raises(type(error)):
            end(error)
        assert run.read_stage()["status"] == status
    assert run.read_stage()["error"] == "ValueError: oh"
    finish(run)
    assert run.is_done
    assert "error" not in run.read_stage()
    assert run.read_stage()["inputs"] == INPUTS


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    finish(run)
    before = run.stage_file.read_text(encoding="utf-8")
    with pytest.raises(InputError) as caught:
        open_ppo(run.path)
    assert str(caught.value) == (
        f"{run.path} already exists (done)\n"
        "  Choose another --out, or add --resume to show its result again."
    )
    assert run.stage_file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    words = r"no config\.yaml" if resume else "already exists .not a run folder."
    with pytest.raises(InputError, match=words):
        open_ppo(tmp_path, resume=resume)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_finished_stage_is_worked_on_again_only_if_asked(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path / "loop")
    finish(open_stage(settings.out, "loop", settings, {}, resume=True))
    run = open_stage(settings.out, "loop", settings, {}, resume=True)
    assert run.is_done
    again = open_stage(settings.out, "loop", settings, {}, resume=True, again=True)
    assert again.read_stage()["status"] == "running"
    with stage_status(again):
        pass


def test_resume_goes_on_with_the_same_settings(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    with pytest.raises(ValueError, match="oh"), stage_status(run):
        raise ValueError("oh")
    open_ppo(run.path, resume=True)
    assert run.read_stage()["status"] == "running"
    assert "error" not in run.read_stage()


def test_resume_of_a_folder_that_is_not_there_starts_it(tmp_path: Path) -> None:
    assert open_ppo(tmp_path / "new", resume=True).read_stage()["status"] == "running"


def test_a_moved_folder_can_be_resumed(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "old")
    with pytest.raises(KeyboardInterrupt), stage_status(run):
        raise KeyboardInterrupt
    run.path.rename(tmp_path / "new")
    open_ppo(tmp_path / "new", resume=True)


def test_a_finished_stage_stays_as_it_is_on_resume(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    finish(run)
    before = run.stage_file.read_text(encoding="utf-8")
    assert open_ppo(run.path, resume=True).is_done
    assert run.stage_file.read_text(encoding="utf-8") == before


def test_resume_with_other_settings_names_them(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    with pytest.raises(InputError) as caught:
        open_ppo(run.path, resume=True, steps=20, rate=1e-5)
    assert str(caught.value) == (
        f"{run.path} was started with other settings (rate: 3e-06 → 1e-05, steps: 10 → 20)\n"
        "  Resume with the same settings, or choose another --out."
    )


def test_a_run_from_before_a_setting_was_there_goes_on_with_its_default(tmp_path: Path) -> None:
    settings = PPOSettings(model="m", reward=("r",), reference=Path("ref"), out=tmp_path / "ppo")
    run = open_stage(settings.out, "ppo", settings, INPUTS, resume=False)
    older = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    del older["loss"]["gamma"], older["kl"]["rows_per_prompt"], older["rewards"]
    del older["sampling"]["correction"]  # of no use to transformers' plain sampling
    run.config_file.write_text(yaml.safe_dump(older), encoding="utf-8")
    for changes in ({"gamma": 0.9}, {"kl": KLSettings(rows_per_prompt=1.0)}):
        with pytest.raises(InputError, match="with other settings"):
            open_stage(run.path, "ppo", changed(settings, **changes), INPUTS, resume=True)
    open_stage(run.path, "ppo", settings, INPUTS, resume=True)
    assert "\n  gamma: 1.0\n" in run.config_file.read_text(encoding="utf-8")


EARLIER = [
    (
        "reward",
        reward_settings(rankings=Path("r"), model="m", out=Path("out"), reads_thinking=False),
        {
            "data.reads_thinking": True,
            "objective.all_bad_weight": 0.0,
            "objective.thumbs_weight": 0.0,
        },
        "data.reads_thinking: True → False, objective.all_bad_weight: 0.0 → 1.0, "
        "objective.thumbs_weight: 0.0 → 1.0",
        "--data.reads-thinking --objective.all-bad-weight 0.0 --objective.thumbs-weight 0.0",
    ),
    (
        "ppo",
        ppo_settings(
            model="m", reward=("r",), reference=Path("ref"), out=Path("out"), engine="continuous"
        ),
        {"sampling.correction": "none"},
        "sampling.correction: none → auto",
        "--sampling.correction none",
    ),
]


def without(recorded: dict[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Recorded settings without those at the paths."""
    return {
        name: without(value, names, f"{name}.") if isinstance(value, dict) else value
        for name, value in recorded.items()
        if f"{prefix}{name}" not in names
    }


@pytest.mark.parametrize(("stage", "settings", "earlier", "changes", "flags"), EARLIER)
def test_a_run_from_before_a_setting_changed_what_is_done_goes_on_as_it_was(
    tmp_path: Path, stage: str, settings: Any, earlier: dict[str, Any], changes: str, flags: str
) -> None:
    run = open_stage(tmp_path / stage, stage, settings, INPUTS, resume=False)
    recorded = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    older = without(recorded, earlier)
    run.config_file.write_text(yaml.safe_dump(older), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        open_stage(run.path, stage, settings, INPUTS, resume=True)
    assert str(caught.value) == (
        f"{run.path} was started with other settings ({changes})\n"
        f"  Resume with the same settings (add {flags}), or choose another --out."
    )
    open_stage(run.path, stage, with_changes(settings, earlier), INPUTS, resume=True)
    run.config_file.write_text(yaml.safe_dump(older), encoding="utf-8")
    with stage_status(run):
        pass
    open_stage(run.path, stage, settings, INPUTS, resume=True)  # nothing is left to be done


SMALLER = [
    (
        "sft",
        SFTSettings(demonstrations=Path("d"), model="m", out=Path("out")),
        {"micro_batch_size": 1},
    ),
    (
        "dpo",
        DPOSettings(rankings=Path("r"), model="m", out=Path("out")),
        {"micro_batch_size": 1},
    ),
    (
        "reward",
        reward_settings(rankings=Path("r"), model="m", out=Path("out")),
        {"batch.micro_tokens": 64},
    ),
    (
        "reference",
        ReferenceSettings(prompts=Path("p"), model="m", out=Path("out")),
        {"batch_size": 1},
    ),
    (
        "ppo",
        PPOSettings(model="m", reward=("r",), reference=Path("ref"), out=Path("out")),
        {"batch.micro_batch_size": 1, "batch.micro_tokens": 64, "sampling.batch_size": 1},
    ),
    (
        "evaluate",
        EvaluateSettings(policy="p", reward="r", reference=Path("ref"), out=Path("out")),
        {"batch_size": 1},
    ),
]


@pytest.mark.parametrize(("stage", "settings", "smaller"), SMALLER)
def test_after_memory_ran_out_resume_takes_smaller_batches(
    tmp_path: Path, stage: str, settings: Any, smaller: dict[str, int]
) -> None:
    out = tmp_path / stage
    open_stage(out, stage, settings, INPUTS, resume=False)
    run = open_stage(out, stage, with_changes(settings, smaller), INPUTS, resume=True)
    recorded = flatten(read_settings_file(run.config_file))
    assert {name: recorded[name] for name in smaller} == smaller


@pytest.mark.parametrize(("stage", "settings", "_"), SMALLER[:2])
def test_the_batch_of_an_optimizer_step_stays_as_it_was(
    tmp_path: Path, stage: str, settings: Any, _: Any
) -> None:
    open_stage(tmp_path / stage, stage, settings, INPUTS, resume=False)
    with pytest.raises(InputError, match=r"with other settings \(batch_size: 16 → 8\)"):
        open_stage(tmp_path / stage, stage, replace(settings, batch_size=8), INPUTS, resume=True)


def test_resume_with_another_input_names_it(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    with pytest.raises(InputError) as caught:
        open_ppo(run.path, {"model": {"path": "m", "hash": "xyz"}}, resume=True)
    assert str(caught.value) == (
        f"The input model (m) has changed since {run.path} was started\n"
        "  Choose another --out and start again."
    )


def test_only_the_main_process_looks_and_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run = open_ppo(tmp_path / "ppo")
    with stage_status(run):
        pass
    assert not run.path.exists()


def test_the_next_stage_reads_a_finished_one(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    finish(run)
    run.report_json.write_text('{"steps": 10}', encoding="utf-8")
    found = require_done(run.path, "ppo", "policy")
    assert found == run
    assert found.read_report() == {"steps": 10}


def test_require_done_says_what_is_missing_and_the_command_that_makes_it(tmp_path: Path) -> None:
    out = tmp_path / "ppo"

    def refusal(stage: str = "ppo", result: str = "policy") -> str:
        with pytest.raises(InputError) as caught:
            require_done(out, stage, result)
        return str(caught.value)

    assert refusal() == (
        f"{out} does not hold a finished ppo stage (no stage.json)\n"
        f"  Make it first: rlhf ppo --out {out} …"
    )
    run = open_ppo(out)
    assert refusal() == (
        f"The ppo stage in {out} is running, not done\n"
        f"  Finish it first: rlhf ppo --config {out / 'config.yaml'} --resume"
    )
    finish(run)
    assert refusal("reward", "model") == (
        f"{out} holds the stage 'ppo', not 'reward'\n  Give the --out folder of rlhf train-reward."
    )
    run.policy.rmdir()
    assert refusal() == f"{out} has no policy folder\n  Make it again with rlhf ppo."


def test_a_stage_that_others_have_yet_to_complete_stays_running(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    with stage_status(run, is_complete=run.report_json.is_file):
        pass
    assert run.read_stage()["status"] == "running"
    with stage_status(run, is_complete=run.report_json.is_file):
        run.report_json.write_text("{}", encoding="utf-8")
    assert run.is_done


def test_two_jobs_may_begin_at_the_same_moment(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "ppo")
    run.path.mkdir()
    (run.path / ".config.yaml.0123abcd.partial").touch()  # the other one's, in work
    open_ppo(run.path)
    run.stage_file.unlink()  # the other one has not written it yet
    assert open_ppo(run.path, resume=True).read_stage()["status"] == "running"


OPENING = """
import pathlib, sys, time
from rlhf.run.rundir import open_stage
from tests.rlhf.run.test_rundir import INPUTS, Settings
out, *shard = sys.argv[1:]
settings = Settings(out=pathlib.Path(out), shard=shard[0] if shard else None)
open_stage(settings.out, "ppo", settings, INPUTS, resume=False)
"""
HOLDING = """
import pathlib, sys, time
from rlhf.run.rundir import RunDir, stage_status
holding = stage_status(RunDir(pathlib.Path(sys.argv[1])))
holding.__enter__()
"""


@contextmanager
def another_process(program: str, *words: object) -> Iterator[str]:
    """A process that works in a folder until the block ends; gives the message about it."""
    command = [sys.executable, "-c", f"{program}print('ready', flush=True)\ntime.sleep(60)"]
    with subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        yield f"Process {other.pid} on {socket.gethostname()} is working in {words[0]}"
        other.kill()


def test_a_second_process_leaves_the_record_of_the_running_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "ppo")
    with another_process(OPENING, run.path) as message:
        files = (run.config_file, run.stage_file, run.packages_file)
        before = [file.read_bytes() for file in files]
        with pytest.raises(InputError, match=re.escape(message)):
            open_ppo(run.path, resume=True)
        assert [file.read_bytes() for file in files] == before
    finish(open_ppo(run.path, resume=True))
    assert run.is_done


def test_jobs_that_fill_one_stage_all_open_it(tmp_path: Path) -> None:
    with another_process(OPENING, tmp_path / "all", "0/2"):
        another = Settings(out=tmp_path / "all", shard="1/2")
        open_stage(tmp_path / "all", "ppo", another, INPUTS, resume=True)


def test_two_processes_never_work_in_one_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.stage_file, {"stage": "ppo", "status": "running"})
    with another_process(HOLDING, run.path) as message:
        with pytest.raises(InputError, match=re.escape(message)), stage_status(run):
            pass
        assert run.read_stage()["status"] == "running"
        with stage_status(run, alone=False, is_complete=lambda: False):
            pass  # one of many jobs that fill a stage
    with stage_status(run):  # the lock has died with its process
        pass
    assert run.read_stage()["status"] == "done"
