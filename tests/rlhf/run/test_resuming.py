"""A stage goes on with the settings and inputs that it was started with."""

from collections.abc import Collection
from dataclasses import replace
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
from rlhf.errors import InputError
from rlhf.run.rundir import open_stage, stage_status
from tests.rlhf.run.stages import INPUTS, Settings, finish, open_ppo
from tests.settings import changed, ppo_settings, reward_settings


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


def test_another_way_to_write_a_path_is_not_another_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "reward", "other"):
        (tmp_path / name).mkdir()
    model, reward = tmp_path / "model", tmp_path / "reward"
    settings = PPOSettings(
        model=str(model), reward=(str(reward),), reference=Path("ref"), out=tmp_path / "ppo"
    )
    open_stage(settings.out, "ppo", settings, INPUTS, resume=False)
    monkeypatch.chdir(tmp_path / "other")
    again = replace(settings, model=f"{reward}/../model", reward=("../reward",))
    open_stage(settings.out, "ppo", again, INPUTS, resume=True)
    for changes in ({"model": "../other"}, {"model": "../none"}, {"reward": ("../model",)}):
        with pytest.raises(InputError, match=f"with other settings .{next(iter(changes))}: "):
            open_stage(settings.out, "ppo", replace(settings, **changes), INPUTS, resume=True)


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
