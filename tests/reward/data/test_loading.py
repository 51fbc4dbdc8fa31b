from dataclasses import replace
from itertools import pairwise

import pytest

from reward.data.loading import read_data
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.tokens import load_tokenizer
from tests.reward.conftest import build_record, export
from tests.settings import reward_settings


def read(folder, tiny_model, **changes):
    settings = reward_settings(rankings=folder, model=str(tiny_model), out=folder / "o", **changes)
    return read_data(settings, load_tokenizer(str(tiny_model)), "me")


def ids(groups):
    return {group.prompt_id for group in groups}


def test_a_limit_takes_part_of_the_train_prompts_and_measures_on_the_same(rankings, tiny_model):
    whole = read(rankings, tiny_model)
    parts = [read(rankings, tiny_model, limit=limit) for limit in ("3", "25%", "50%", "100%")]
    assert [len(part.train) for part in parts] == [3, 6, 12, 24]
    for smaller, larger in pairwise(parts):
        assert ids(smaller.train) < ids(larger.train)
    assert all(part.held_out == whole.held_out for part in parts)
    assert parts[1].counts["train"]["prompts_beyond_limit"] == 18
    assert parts[3] == whole
    assert "prompts_beyond_limit" not in whole.counts["train"]


def test_a_limit_measures_on_the_same_prompts_where_they_come_from_the_train_prompts(
    tiny_model, tmp_path
):
    export(tmp_path, [build_record(n) for n in range(20)])
    whole, part = (read(tmp_path, tiny_model, limit=limit) for limit in ("100%", "10%"))
    assert ids(part.held_out) == ids(whole.held_out)
    assert (len(part.train), len(part.held_out)) == (2, 2)


def test_a_limit_and_evaluations_share_what_is_left(rankings, tiny_model):
    data = read(rankings, tiny_model, limit="50%", eval_every=1, held_out_fraction=0.25)
    assert (len(data.train), len(data.validation)) == (9, 3)


def test_what_one_limit_sets_aside_for_evaluations_no_other_trains_on(rankings, tiny_model):
    limits = ("2", "5", "25%", "50%", "23", "100%")
    changes = {"eval_every": 1, "held_out_fraction": 0.25}
    parts = [read(rankings, tiny_model, limit=limit, **changes) for limit in limits]
    # a quarter of 2, 5, 6, 12, 23 and 24, and at least one
    assert [len(part.validation) for part in parts] == [1, 1, 2, 3, 6, 6]
    assert [len(part.train) for part in parts] == [1, 4, 4, 9, 17, 18]
    for smaller, larger in pairwise(parts):
        assert ids(smaller.train) <= ids(larger.train)
        assert ids(smaller.validation) <= ids(larger.validation)
    assert not ids(parts[-1].train) & ids(parts[-1].validation)


def test_a_limit_that_leaves_nothing_to_train_on_is_refused(rankings, tiny_model):
    with pytest.raises(InputError, match="0 to train on, 8 to measure with") as caught:
        read(rankings, tiny_model, limit="1%", eval_every=1)
    assert "Raise --data.limit (now 1%)" in caught.value.remedy


def scores_of(groups):
    return [ranking.scores for group in groups for ranking in group.rankings]


def scored_records():
    """16 train prompts with scores 9, 5, 5, 1: mean 5, deviation √8; 4 test prompts."""
    splits = ["test"] * 4 + ["train"] * 16
    return [build_record(n, split, scores=(9, 5, 5, 1)) for n, split in enumerate(splits)]


def test_a_regression_gets_standard_scores(tiny_model, tmp_path):
    folder = export(tmp_path, scored_records())
    data = read(folder, tiny_model, loss="regression", eval_every=1)
    assert (len(data.train), len(data.validation)) == (14, 2)
    expected = pytest.approx([2**0.5, 0, 0, -(2**0.5)])
    assert all(list(scores) == expected for scores in scores_of([*data.train, *data.validation]))
    assert data.counts["train"]["rankings_with_scores"] == 16


def test_other_losses_see_the_same_data_with_scores_and_without(tiny_model, tmp_path):
    folders = [tmp_path / "scored", tmp_path / "plain"]
    scored = export(folders[0], scored_records())
    plain = export(folders[1], [build_record(n, "test" if n < 4 else "train") for n in range(20)])
    with_scores, without = (read(folder, tiny_model).train for folder in (scored, plain))
    assert [group.pairs for group in with_scores] == [group.pairs for group in without]
    assert [group.responses for group in with_scores] == [group.responses for group in without]


def test_a_regression_without_any_scores_keeps_to_ranks(rankings, tiny_model):
    data = read(rankings, tiny_model, loss="regression")
    assert set(scores_of(data.train)) == {()}
    assert data == read(rankings, tiny_model)


def with_people(records):
    """The same with a second ranking, by a person and without scores, of the first three."""
    signals = [replace(record.rankings[0], kind="signal", annotator="s") for record in records]
    both = [replace(record.rankings[0], id="p", scores=()) for record in records]
    return [
        replace(record, rankings=(signals[n], both[n]) if 4 <= n < 7 else (signals[n],))
        for n, record in enumerate(records)
    ]


def test_a_regression_mixes_no_scores_and_ranks(tiny_model, tmp_path):
    folder = export(tmp_path, with_people(scored_records()))
    with pytest.raises(InputError, match="16 have scores and 3 have none") as caught:
        read(folder, tiny_model, loss="regression", eval_every=1)
    assert "rlhf export --kind signal --db DB --out DIR, or" in caught.value.remedy
    assert "--loss bradley_terry" in caught.value.remedy
    weights = {"ann": 0.0}  # who does not count mixes nothing
    data = read(folder, tiny_model, loss="regression", annotator_weights=weights)
    assert len(scores_of(data.train)) == 16
    read(folder, tiny_model)


def test_a_limit_that_is_none_is_refused(rankings, tiny_model):
    with pytest.raises(ConfigError, match=r"--data\.limit is 'half'"):
        read(rankings, tiny_model, limit="half")
