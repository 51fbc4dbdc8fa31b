import math
from dataclasses import replace

import pytest
import torch

from reward.training.evaluation import Best, compare
from reward.training.train import train_reward
from rlhf.errors import ConfigError
from rlhf.modeling.models import load_reward_model
from rlhf.run.metrics import read_metrics
from tests.reward.conftest import build_record, export, settings_for, stored


def test_the_earlier_of_two_equal_evaluations_is_best_and_later_ones_are_counted():
    best = compare(None, 10, 0.6)
    assert best == Best(10, 0.6)
    best = compare(best, 20, 0.6)
    assert best == Best(10, 0.6, since=1)
    assert compare(best, 30, 0.5) == Best(30, 0.5)
    worse = compare(best, 30, math.nan)
    assert worse == Best(10, 0.6, since=2)
    assert compare(compare(None, 10, math.nan), 20, 0.9) == Best(20, 0.9)
    assert [worse.is_stale(patience) for patience in (None, 1, 2, 3)] == [False, True, True, False]


def test_evaluations_stand_in_the_metrics_and_choose_the_weights(rankings, tiny_model, tmp_path):
    out = tmp_path / "out"
    report = train_reward(settings_for(rankings, tiny_model, out, epochs=4, eval_every=3))
    rows = read_metrics(out / "metrics.jsonl")
    assert len(rows) == 24  # 22 prompts, 4 a step, 6 steps an epoch
    evaluated = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert list(evaluated) == [3, 6, 9, 12, 15, 18, 21, 24]
    best = min(evaluated, key=evaluated.__getitem__)
    assert report["best"] == {"step": best, "loss": evaluated[best], "prompts": 2}
    assert f"those of step {best} of 24" in (out / "report.html").read_text()


def test_the_held_out_prompts_measure_and_do_not_choose(rankings, tiny_model, tmp_path):
    plain = train_reward(settings_for(rankings, tiny_model, tmp_path / "a"))
    chosen = train_reward(settings_for(rankings, tiny_model, tmp_path / "b", eval_every=2))
    assert plain["held_out"] == chosen["held_out"]
    assert plain["best"] is None


@pytest.fixture
def contradicting(tmp_path):
    """Train prompts that teach one order and, for those set aside for evaluation, its reverse."""
    from reward.data.groups import Group
    from reward.data.loading import hold_out

    records = [build_record(n) for n in range(20)]
    groups = [Group(record.prompt.id, (n,), ()) for n, record in enumerate(records)]
    aside = {group.prompt_id for group in hold_out(stored(groups), 0.3)[1]}
    records = [
        replace(r, rankings=tuple(replace(k, tiers=k.tiers[::-1]) for k in r.rankings))
        if r.prompt.id in aside
        else r
        for r in records
    ]
    export(tmp_path / "data", records + [build_record(n, "test") for n in range(20, 24)])
    return tmp_path / "data"


def test_training_stops_when_evaluations_get_worse_and_keeps_the_best(
    contradicting, tiny_model, tmp_path
):
    changes = {"epochs": 20, "eval_every": 2, "patience": 2, "held_out_fraction": 0.3}
    settings = settings_for(contradicting, tiny_model, tmp_path / "out", **changes)
    report = train_reward(settings)
    assert report["best"]["step"] == 2  # it only gets worse
    assert report["loss"]["steps"] == 6
    assert not list((tmp_path / "out/checkpoints").glob("step-*"))  # --save-every is 50

    until = settings_for(contradicting, tiny_model, tmp_path / "two", **changes | {"patience": 1})
    train_reward(until)
    weights = [
        load_reward_model(str(tmp_path / name / "model")).model.state_dict()
        for name in ("out", "two")
    ]
    torch.testing.assert_close(*weights, atol=0, rtol=0)


def test_resuming_remembers_the_best_and_the_patience(contradicting, tiny_model, tmp_path):
    changes = {"epochs": 20, "eval_every": 2, "patience": 4, "held_out_fraction": 0.3}
    whole = settings_for(contradicting, tiny_model, tmp_path / "out", save_every=5, **changes)
    first = train_reward(whole)
    stage = tmp_path / "out/stage.json"
    stage.write_text(stage.read_text().replace('"done"', '"interrupted"'))
    again = train_reward(replace(whole, resume=True))
    assert first["loss"]["steps"] == again["loss"]["steps"] == 10
    assert first["best"] == again["best"]
    assert first["accuracy"] == again["accuracy"]


def test_patience_needs_evaluations(tmp_path):
    message = r"--evaluation\.patience 3 counts evaluations, and without --evaluation\.every"
    with pytest.raises(ConfigError, match=message):
        settings_for(tmp_path, "m", tmp_path / "out", patience=3)
