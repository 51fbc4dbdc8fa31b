"""Thumbs, flags and "all bad" of an export as pointwise judgments of groups."""

from dataclasses import replace

import pytest

from reward.data.groups import Encoder, Pair, Pointwise, PointwiseRules
from reward.data.loading import hold_out, read_data
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.tokens import load_tokenizer
from tests.reward.conftest import build_record, export, stored, thumbed
from tests.reward.data.grouping import build_groups
from tests.settings import reward_settings


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


def build(tokenizer, records, **changes):
    return build_groups(records, Encoder.create(tokenizer, 200, truncate=False, **changes))


def read(folder, tiny_model, **changes):
    settings = reward_settings(rankings=folder, model=str(tiny_model), out=folder / "o", **changes)
    return read_data(settings, load_tokenizer(str(tiny_model)), "me")


def test_a_thumb_is_a_judgment_of_its_response_and_nothing_else_is_encoded(tokenizer):
    [group], counts = build(tokenizer, [thumbed(1, {2: "thumbs-down"})])
    assert (group.pairs, group.rankings, len(group.responses)) == ((), (), 1)
    assert group.pointwise == (Pointwise(0, False, "ann", "thumbs"),)
    assert counts == {
        "rankings": 1, "prompts": 1, "responses": 1, "pairs": 0, "ties": 0, "thumbs_down": 1
    }  # fmt: skip


def test_thumbs_stand_beside_the_pairs_of_a_ranking(tokenizer):
    record = build_record(1, tiers=((3,), (0,)))
    record = replace(record, rankings=record.rankings + thumbed(1, {1: "thumbs-up"}).rankings)
    [group], counts = build(tokenizer, [record])
    assert len(group.responses) == 3
    assert group.pairs == (Pair(2, 0, 1.0, 0, "ann"),)
    assert group.pointwise == (Pointwise(1, True, "ann", "thumbs"),)
    assert (counts["pairs"], counts["thumbs_up"]) == (1, 1)


def test_all_bad_is_as_many_judgments_as_it_has_responses_and_keeps_its_tiers(tokenizer):
    record = build_record(1, tiers=((3, 0),))
    record = replace(record, rankings=(replace(record.rankings[0], flags=("all-bad",)),))
    [group], counts = build(tokenizer, [record])
    assert group.pairs == (Pair(1, 0, 0.5, 0, "ann"),)
    assert group.pointwise == tuple(Pointwise(n, False, "ann", "all_bad") for n in (1, 0))
    assert counts["responses_of_all_bad"] == 2


def test_weights_of_annotators_and_of_kinds_multiply_and_0_leaves_out(tokenizer):
    bad = build_record(1, tiers=((0, 1),))
    bad = replace(bad, rankings=(replace(bad.rankings[0], annotator="bob", flags=("all-bad",)),))
    thumbs = thumbed(1, {2: "thumbs-up", 3: "thumbs-down"})
    record = replace(bad, rankings=bad.rankings + thumbs.rankings)
    kinds = {"thumbs": 0.5, "all_bad": 4.0}
    given = {"weights": {"ann": 0.2, "bob": 0.25}, "pointwise": PointwiseRules(kinds)}
    [group], _ = build(tokenizer, [record], **given)
    assert [one.weight for one in group.pointwise] == [0.1, 0.1, 1.0, 1.0]
    assert [pair.weight for pair in group.pairs] == [0.25]
    [group], _ = build(tokenizer, [record], pointwise=PointwiseRules({"thumbs": 0.0}))
    assert {one.kind for one in group.pointwise} == {"all_bad"}
    groups, counts = build(tokenizer, [thumbs], weights={"ann": 0.0})
    assert (groups, counts["prompts_without_pairs"]) == ([], 1)


def test_flags_of_responses_count_as_thumbs_where_they_are_named(tokenizer):
    record = build_record(1)
    flag = f"unsafe@{record.responses[2].id}"
    record = replace(record, rankings=(replace(record.rankings[0], flags=(flag,)),))
    [plain], _ = build(tokenizer, [record])
    assert plain.pointwise == ()
    [group], _ = build(tokenizer, [record], pointwise=PointwiseRules({}, ("unsafe",)))
    assert group.pointwise == (Pointwise(2, False, "ann", "thumbs"),)
    assert replace(group, pointwise=()) == plain


def test_a_flag_that_no_response_has_is_refused(rankings, tiny_model):
    with pytest.raises(ConfigError, match="names unsafe, which no response is flagged as") as error:
        read(rankings, tiny_model, thumbs_down_flags=("unsafe",))
    assert "flagged as: nothing" in error.value.remedy


def thumbs(numbers, *flags, split="train"):
    return [thumbed(n, {0: flags[n % len(flags)]}, split) for n in numbers]


def test_thumbs_alone_train_and_pairs_measure(tiny_model, tmp_path):
    tests = [build_record(n, "test") for n in range(3)]
    folder = export(tmp_path, [*tests, *thumbs(range(3, 9), "thumbs-up", "thumbs-down")])
    data = read(folder, tiny_model)
    assert [len(group.pointwise) for group in data.train] == [1] * 6
    assert [len(group.pairs) for group in data.held_out] == [6] * 3


def test_pairs_and_thumbs_are_both_held_out(tiny_model, tmp_path):
    pairs = [build_record(n) for n in range(10)]
    folder = export(tmp_path, [*pairs, *thumbs(range(10, 40), "thumbs-up", "thumbs-down")])
    data = read(folder, tiny_model)
    assert sorted(len(group.pairs) for group in data.held_out) == [0] * 3 + [6]
    validated = read(folder, tiny_model, eval_every=1)
    assert {bool(group.pairs) for group in validated.validation} == {True, False}


def test_pairs_are_held_out_where_the_test_prompts_have_thumbs_alone(tiny_model, tmp_path):
    tests = thumbs(range(10, 14), "thumbs-up", split="test")
    folder = export(tmp_path, [*(build_record(n) for n in range(10)), *tests])
    data = read(folder, tiny_model)
    assert sorted(len(group.pairs) for group in data.held_out) == [0] * 4 + [6]


@pytest.mark.parametrize(("flag", "word"), [("thumbs-up", "up"), ("thumbs-down", "down")])
def test_thumbs_that_all_say_the_same_are_refused(tiny_model, tmp_path, flag, word):
    folder = export(tmp_path, thumbs(range(4), flag))
    with pytest.raises(InputError, match=rf"All thumbs on the 3 train prompts .* are {word}, and"):
        read(folder, tiny_model)


def test_the_only_ranked_prompt_is_trained_on(tiny_model, tmp_path):
    pairs = [build_record(0)]
    folder = export(tmp_path, [*pairs, *thumbs(range(10, 30), "thumbs-up", "thumbs-down")])
    data = read(folder, tiny_model)
    assert sum(bool(group.pairs) for group in data.train) == 1
    assert (len(data.train), len(data.held_out)) == (19, 2)  # a tenth of 20
    twin = replace(data.train[0], prompt_id="twin")
    assert hold_out(stored([data.train[0], twin]), 0.1) == ([data.train[0], twin], [])


def test_evaluations_without_a_prompt_to_set_aside_are_refused(tiny_model, tmp_path):
    tests = [build_record(n, "test") for n in range(3)]
    folder = export(tmp_path, [*tests, build_record(3), *thumbs([4], "thumbs-up")])
    with pytest.raises(InputError) as caught:
        read(folder, tiny_model, eval_every=5)
    assert str(caught.value) == (
        f"--evaluation.every 5 sets train prompts aside, and the 2 of {folder} are too few\n"
        "  Leave --evaluation.every out, or judge responses of more prompts."
    )


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (thumbs(range(3), "thumbs-up", split="test"), "the export's test prompts have no pairs"),
        ([], "the export has no judged test prompts"),
    ],
)
def test_why_train_prompts_are_set_aside(tiny_model, tmp_path, tests, why):
    folder = export(tmp_path, [*tests, *(build_record(n) for n in range(10, 20))])
    data = read(folder, tiny_model)
    assert data.held_out_source == f"train prompts set aside, because {why}"
