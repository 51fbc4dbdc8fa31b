"""`train-reward --learning-curve`: nested parts, the report, and going on after a kill."""

import json

import pytest

from reward.training.learning_curve import train_learning_curve
from reward.training.train import train_reward
from rlhf.errors import ConfigError, InputError
from rlhf.planning.price import cost_of
from rlhf.records.fingerprints import file_hash
from rlhf.records.ranked import write_ranked
from rlhf.run.rundir import RunDir
from tests.reward.conftest import build_record
from tests.settings import changed, reward_settings

PARTS = ("part-1-of-8", "part-1-of-4", "part-1-of-2")
MODEL = "model/model.safetensors"


@pytest.fixture(scope="module")
def curve(rankings, tiny_model, tmp_path_factory):
    settings = reward_settings(
        rankings=rankings,
        model=str(tiny_model),
        out=tmp_path_factory.mktemp("curve") / "reward",
        precision="fp32",
        prompts_per_batch=4,
        learning_rate=1e-3,
        learning_curve=True,
    )
    return settings, train_learning_curve(settings)


def test_the_curve_is_in_the_report(curve):
    settings, report = curve
    found = report["learning_curve"]
    # 24 train prompts with a ranking each
    assert [one["labels"] for one in found["points"]] == [3, 6, 12, 24]
    assert [one["train_prompts"] for one in found["points"]] == [3, 6, 12, 24]
    assert [found[name]["labels"] for name in ("forecast", "forecast_4x")] == [48, 96]
    for name, point in zip(PARTS, found["points"], strict=False):
        own = json.loads((settings.out / name / "report.json").read_text())
        assert point.items() >= own["accuracy"].items()
    assert found["points"][-1].items() >= report["accuracy"].items()
    whole = json.loads((settings.out / "report.json").read_text())
    assert whole["learning_curve"] == found
    assert sum(pairs for _, pairs in whole["held_out_counts"].values()) == 40
    page = (settings.out / "report.html").read_text()
    assert "24 labels give" in page
    assert 'alt="Accuracy against the number of labels, with forecasts"' in page


def test_an_interrupted_curve_does_not_cost_twice(curve, tmp_path, monkeypatch):
    settings = changed(curve[0], out=tmp_path / "curve")
    trained = []

    def train(part, *_, **__):
        if trained:
            raise KeyboardInterrupt
        trained.append(train_reward(part, is_member=True))
        return trained[0]

    monkeypatch.setattr("reward.training.learning_curve.train_reward", train)
    with pytest.raises(KeyboardInterrupt):
        train_learning_curve(settings)
    found = cost_of(RunDir(settings.out), None)["device_hours"]
    assert found == pytest.approx(
        RunDir(settings.out).read_stage()["device_seconds"] / 3600, abs=1e-6
    )


def test_the_whole_is_trained_as_without_a_curve(curve, tmp_path):
    settings, _ = curve
    train_reward(changed(settings, out=tmp_path / "plain", learning_curve=False))
    assert file_hash(tmp_path / "plain" / MODEL) == file_hash(settings.out / MODEL)


def test_finished_parts_are_kept_when_it_is_resumed(curve):
    settings, report = curve
    before = {name: (settings.out / name / MODEL).stat().st_mtime_ns for name in PARTS}
    for folder in (settings.out, settings.out / PARTS[1]):  # as a kill leaves them
        stage = folder / "stage.json"
        stage.write_text(stage.read_text().replace('"done"', '"running"'))
    with pytest.raises(InputError, match="already exists"):
        train_learning_curve(settings)
    again = train_learning_curve(changed(settings, resume=True))
    assert again["learning_curve"] == report["learning_curve"]
    after = {name: (settings.out / name / MODEL).stat().st_mtime_ns for name in PARTS}
    assert {name for name in PARTS if before[name] != after[name]} == {PARTS[1]}
    assert train_learning_curve(changed(settings, resume=True))["already_done"]


def test_a_curve_wants_enough_prompts_and_one_model(curve, tmp_path):
    settings, _ = curve
    write_ranked(tmp_path, [build_record(n, "test" if n < 4 else "train") for n in range(30)], {})
    few = changed(settings, rankings=tmp_path, out=tmp_path / "out")
    with pytest.raises(InputError, match="gives 26 and 4"):
        train_learning_curve(few)
    assert not few.out.exists()
    with pytest.raises(ConfigError, match="not an ensemble of 2"):
        changed(settings, seeds=(0, 1))
