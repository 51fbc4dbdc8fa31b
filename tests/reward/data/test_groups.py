from dataclasses import replace

import numpy as np
import pytest

from reward.data.groups import (
    Encoder,
    Group,
    Pair,
    TieredRanking,
    rank_pairs,
)
from reward.data.loading import hold_out, standardize_scores
from rlhf.errors import InputError
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.schema import Message, Prompt, Ranking
from tests.reward.conftest import build_record, stored
from tests.reward.data.grouping import build_groups


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def encoder(tokenizer):
    return Encoder.create(tokenizer, 200, truncate=False)


def ranking(*tiers, strengths=()):
    return Ranking(
        id="r", prompt_id="p", annotator="ann", kind="human", tiers=tiers, strengths=strengths
    )


def test_pairs_of_a_ranking_with_a_tie_and_strengths():
    position = {"a": 0, "b": 1, "c": 2, "d": 3}
    got = set(rank_pairs(ranking(("c",), ("a", "b"), ("d",), strengths=(1, 3)), position))
    assert got == {
        Pair(0, 1, 0.5, 0, "ann"),
        Pair(2, 0, 1.0, 1, "ann"),
        Pair(2, 1, 1.0, 1, "ann"),
        Pair(2, 3, 1.0, 4, "ann"),
        Pair(0, 3, 1.0, 3, "ann"),
        Pair(1, 3, 1.0, 3, "ann"),
    }


def test_group_has_prompt_once_and_responses_with_end_token(tokenizer, encoder):
    record = build_record(1)
    (group,), counts = build_groups([record], encoder)
    text = tokenizer.decode(group.prompt)
    assert text.startswith("<|im_start|>user\nHow was trip 1")
    assert text.endswith("<|im_start|>assistant\n")
    decoded = [tokenizer.decode(response) for response in group.responses]
    assert decoded == [response.text + "<|im_end|>" for response in record.responses]
    assert counts == {"rankings": 1, "prompts": 1, "responses": 4, "pairs": 6, "ties": 1}


def test_every_annotator_counts_and_unjudged_responses_are_left_out(encoder):
    record = build_record(1, tiers=((3,), (0,)))
    ids = [response.id for response in record.responses]
    second = replace(record.rankings[0], annotator="bob", tiers=((ids[0],), (ids[3],)))
    record = replace(record, rankings=(*record.rankings, second))
    (group,), _ = build_groups([record], encoder)
    assert len(group.responses) == 2
    assert group.pairs == (Pair(1, 0, 1.0, 0, "ann"), Pair(0, 1, 1.0, 0, "bob"))


def test_prompt_without_a_pair_is_dropped_and_counted(encoder):
    groups, counts = build_groups([build_record(1, tiers=((2,),)), build_record(2)], encoder)
    assert len(groups) == 1
    assert counts["prompts_without_pairs"] == 1


def test_annotators_have_weights_and_weight_0_is_left_out(tokenizer):
    record = build_record(1, tiers=((3,), (0,)))
    second = replace(record.rankings[0], annotator="bob")
    third = replace(record.rankings[0], annotator="eve", tiers=(*record.rankings[0].tiers[::-1],))
    record = replace(record, rankings=(*record.rankings, second, third))
    encoder = Encoder.create(tokenizer, 200, truncate=False, weights={"bob": 0.25, "eve": 0})
    (group,), _ = build_groups([record], encoder)
    assert group.pairs == (Pair(1, 0, 1.0, 0, "ann"), Pair(1, 0, 1.0, 0, "bob", weight=0.25))
    assert group.rankings == (
        TieredRanking(((1,), (0,)), "ann"),
        TieredRanking(((1,), (0,)), "bob", weight=0.25),
    )


def test_scores_stay_with_their_ranking_and_are_counted(encoder):
    record = build_record(1, tiers=((3,), (0, 1)), scores=(5, 2, 3))
    second = replace(record.rankings[0], annotator="bob", scores=())
    record = replace(record, rankings=(*record.rankings, second))
    (group,), counts = build_groups([record], encoder)
    assert group.rankings == (
        TieredRanking(((2,), (0, 1)), "ann", scores=(5, 2, 3)),
        TieredRanking(((2,), (0, 1)), "bob"),
    )
    assert (counts["rankings"], counts["rankings_with_scores"]) == (2, 1)


def scored(*rankings):
    """A group of two responses with such scores in its rankings."""
    found = tuple(TieredRanking(((1,), (0,)), "ann", scores=scores) for scores in rankings)
    return Group("a", (1,), ((2,), (3,)), rankings=found)


def scores_of(groups):
    return [ranking.scores for group in groups for ranking in group.rankings]


def test_standard_scores_by_hand():
    # mean 40 / 8 = 5; squares 16 1 4 9 0 1 0 1: deviation √(32 / 8) = 2
    train = stored([scored((9, 4), (7, 2)), scored((5, 4)), scored((5, 4))])
    got, others = standardize_scores(train, stored([scored((13, 1))]))
    assert scores_of(got) == [(2, -0.5), (1, -1.5), (0, -0.5), (0, -0.5)]
    assert scores_of(others) == [(4, -2)]  # on the scale of the others
    assert [replace(one, rankings=()) for one in got] == [replace(g, rankings=()) for g in train]


def test_standard_scores_against_numpy():
    table = -np.sort(-np.random.default_rng(0).normal(1e9, 2, size=(50, 2)))
    got, _ = standardize_scores(stored([scored(*map(tuple, table.tolist()))]), stored([]))
    expected = (table - table.mean()) / np.sqrt(((table - table.mean()) ** 2).mean())
    np.testing.assert_allclose(scores_of(got), expected, atol=1e-6)


@pytest.mark.parametrize("same", [0.0, 0.1, 7.0])
def test_scores_that_are_all_the_same_are_refused(same):
    message = f"The 6 scores of the training rankings are all {same:g}\n.* --loss bradley_terry"
    with pytest.raises(InputError, match=message):
        standardize_scores(stored([scored((same, same))] * 3), stored([scored((2, 1))]))


def test_intransitive_judgments_train_as_pairs(encoder):
    record = build_record(1)
    ids = [response.id for response in record.responses]
    circle = [(0, 1), (1, 2), (2, 0)]
    rankings = tuple(
        replace(record.rankings[0], id=f"r{a}", tiers=((ids[a],), (ids[b],))) for a, b in circle
    )
    (group,), counts = build_groups([replace(record, rankings=rankings)], encoder)
    assert [(pair.first, pair.second) for pair in group.pairs] == circle
    assert counts["pairs"] == 3


def test_stored_token_ids_are_used_only_with_the_same_tokenizer(encoder):
    record = build_record(1)
    first = replace(
        record.responses[0], token_ids=(5, 6), tokenizer_fingerprint=encoder.fingerprint
    )
    other = replace(record.responses[1], token_ids=(5, 6), tokenizer_fingerprint="another")
    record = replace(record, responses=(first, other, *record.responses[2:]))
    (group,), _ = build_groups([record], encoder)
    assert group.responses[0] == (5, 6, 2)  # closed by the end token
    assert group.responses[1] != (5, 6, 2)


def test_truncation_drops_the_oldest_turns_and_keeps_the_system_message(tokenizer):
    record = build_record(1)
    turns = [("system", "Be kind."), ("user", "Old question. " * 30), ("assistant", "Old answer.")]
    messages = tuple(Message(role=r, content=c) for r, c in [*turns, ("user", "How was it?")])
    record = replace(record, prompt=Prompt.create(messages, "train", "test"))
    encoder = Encoder.create(tokenizer, 200, truncate=True)
    (group,), counts = build_groups([record], encoder)
    text = tokenizer.decode(group.prompt)
    assert "Be kind." in text
    assert "How was it?" in text
    assert "Old" not in text
    assert "prompts_too_long" not in counts


def test_a_prompt_of_one_long_turn_is_dropped_and_counted_when_truncating(tokenizer):
    encoder = Encoder.create(tokenizer, 20, truncate=True)
    groups, counts = build_groups([build_record(1)], encoder)
    assert groups == []
    assert counts["prompts_too_long"] == 1


def test_a_response_that_is_there_twice_is_refused(encoder):
    record = build_record(1)
    twice = replace(record, responses=(*record.responses, record.responses[0]))
    with pytest.raises(InputError, match=f"more than one response {record.responses[0].id}"):
        build_groups([twice], encoder)


def test_hold_out_depends_on_ids_alone(encoder):
    groups, _ = build_groups([build_record(n) for n in range(20)], encoder)
    train, held_out = hold_out(stored(groups), 0.1)
    again, _ = hold_out(stored(reversed(groups)), 0.1)
    assert len(held_out) == 2
    assert {g.prompt_id for g in train} == {g.prompt_id for g in again}
    assert not {g.prompt_id for g in train} & {g.prompt_id for g in held_out}


def test_a_prompt_under_two_ids_is_held_out_as_one(encoder):
    groups, _ = build_groups([build_record(n) for n in range(6)], encoder)
    twins = [replace(group, prompt_id=f"twin-{group.prompt_id}") for group in groups]
    train, held_out = hold_out(stored([*groups, *twins]), 0.25)  # 3 of 12
    assert len(train) + len(held_out) == 12
    assert 4 <= len(held_out) <= 6
    assert not {g.prompt for g in train} & {g.prompt for g in held_out}
