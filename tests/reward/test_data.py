from itertools import pairwise

import pytest

from reward.data import read_data
from reward.settings import RewardSettings
from rlhf.errors import ConfigError, InputError
from rlhf.ranked import write_ranked
from rlhf.tokens import load_tokenizer

from .conftest import build_record


def read(folder, tiny_model, **changes):
    settings = RewardSettings(rankings=folder, model=str(tiny_model), out=folder / "o", **changes)
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
    write_ranked(tmp_path, [build_record(n) for n in range(20)], {})
    whole, part = (read(tmp_path, tiny_model, limit=limit) for limit in ("100%", "10%"))
    assert ids(part.held_out) == ids(whole.held_out)
    assert (len(part.train), len(part.held_out)) == (2, 2)


def test_a_limit_and_evaluations_share_what_is_left(rankings, tiny_model):
    data = read(rankings, tiny_model, limit="50%", eval_every=1, held_out_fraction=0.25)
    assert (len(data.train), len(data.validation)) == (9, 3)


def test_a_limit_that_leaves_nothing_to_train_on_is_refused(rankings, tiny_model):
    with pytest.raises(InputError, match="0 to train on, 8 to measure with") as caught:
        read(rankings, tiny_model, limit="1%", eval_every=1)
    assert "Raise --limit (now 1%)" in caught.value.remedy


def test_a_limit_that_is_none_is_refused(rankings, tiny_model):
    with pytest.raises(ConfigError, match="--limit is 'half'"):
        read(rankings, tiny_model, limit="half")
