import math
from dataclasses import replace

import pytest
import torch

from reward.data.groups import Group, Pair, TieredRanking
from reward.objective import (
    Objective,
    sum_of_losses,
    to_pair_tensors,
    to_ranking_tensors,
    total_weight,
)

CPU = torch.device("cpu")
FIRST = Group(
    "a",
    (1,),
    ((2,), (3,)),
    (Pair(1, 0, 1.0, 2, "x", weight=0.5),),
    (TieredRanking(((1,), (0,)), "x", 0.5),),
)
SECOND = Group(
    "b",
    (1,),
    ((2,), (3,), (4,)),
    (Pair(0, 1, 0.5, 0, "x"), Pair(2, 0, 1.0, 0, "x"), Pair(2, 1, 1.0, 0, "x")),
    (TieredRanking(((2,), (0, 1)), "x"),),
)
REWARDS = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0])
WON_BY_1 = math.log(1 + math.exp(-1))


def test_pairs_number_responses_over_all_groups():
    pairs = to_pair_tensors([FIRST, SECOND], CPU)
    assert pairs.first.tolist() == [1, 2, 4, 4]
    assert pairs.second.tolist() == [0, 3, 2, 3]
    assert pairs.outcome.tolist() == [1.0, 0.5, 1.0, 1.0]
    assert pairs.strength.tolist() == [2, 0, 0, 0]
    assert pairs.weight.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert pairs.prompt.tolist() == [0, 1, 1, 1]


def test_rankings_number_responses_over_all_groups_and_pad_with_no_tier():
    rankings = to_ranking_tensors([FIRST, SECOND], CPU)
    assert rankings.tier.tolist() == [[0, 1, -1], [0, 1, 1]]
    assert rankings.response.tolist() == [[1, 0, 0], [4, 2, 3]]
    assert rankings.weight.tolist() == [0.5, 1.0]
    assert rankings.prompt.tolist() == [0, 1]


def test_pairs_by_hand():
    # first prompt, of weight ½: won by 1; second: a tie at 0 (log 2) and two won by 1
    got = sum_of_losses(Objective(), [FIRST, SECOND], REWARDS)
    assert got.item() == pytest.approx(WON_BY_1 / 2 + (math.log(2) + 2 * WON_BY_1) / 3)


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce", "regression"])
def test_the_weight_of_a_batch_is_that_of_each_prompts_mean_judgement(loss):
    assert total_weight(Objective(loss), [FIRST, SECOND]) == 1.5
    assert total_weight(Objective(loss), [SECOND] * 3) == 3
    assert total_weight(Objective(loss), []) == 0


def test_margin_counts_steps_of_strength():
    # the first pair has strength 2: margin 2·0.5 = 1 takes its whole lead away; its weight is ½
    got = sum_of_losses(Objective(margin=0.5), [FIRST], REWARDS[:2])
    assert got.item() == pytest.approx(math.log(2) / 2)


def test_whole_rankings_by_hand():
    # first, of weight ½: won by 1;
    # second: log(e² + 2e) − 2, then a tie of equal rewards: 2·log 2 − log 2
    got = sum_of_losses(Objective("plackett_luce"), [FIRST, SECOND], REWARDS)
    tie = math.log(2)
    expected = WON_BY_1 / 2 + math.log(math.exp(2) + 2 * math.e) - 2 + tie
    assert got.item() == pytest.approx(expected)


def test_regression_by_hand():
    # first, of weight ½: 1 against 1 and 0 against −1: (0 + 1)/2;
    # second: 2 against 1, 1 and 1 against −½: 5.5/3
    got = sum_of_losses(Objective("regression"), [FIRST, SECOND], REWARDS)
    assert got.item() == pytest.approx(0.5 / 2 + (1 + 2 * 1.5**2) / 3)


def with_scores(group, *scores):
    [ranking] = group.rankings
    return replace(group, rankings=(replace(ranking, scores=scores),))


def test_scores_stand_beside_their_responses():
    rankings = to_ranking_tensors([with_scores(FIRST, 2, 0.5), SECOND], CPU)
    assert rankings.response.tolist() == [[1, 0, 0], [4, 2, 3]]
    assert rankings.score[0, :2].tolist() == [2, 0.5]
    assert rankings.score.isnan().tolist() == [[False, False, True], [True, True, True]]


def test_regression_to_scores_by_hand():
    # first, of weight ½: 1 against 2 and 0 against ½: (1 + ¼)/2;
    # second: 2 against 1½, 1 against 0 and −1: 5¼/3
    scored = [with_scores(FIRST, 2, 0.5), with_scores(SECOND, 1.5, 0, -1)]
    got = sum_of_losses(Objective("regression"), scored, REWARDS)
    assert got.item() == pytest.approx(0.625 / 2 + 1.75)


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce"])
def test_scores_change_no_other_loss(loss):
    scored = [with_scores(FIRST, 2, 1), with_scores(SECOND, 1.5, 0, -1)]
    expected = sum_of_losses(Objective(loss), [FIRST, SECOND], REWARDS)
    assert torch.equal(sum_of_losses(Objective(loss), scored, REWARDS), expected)


def test_centring_adds_the_squared_sum_of_each_pair():
    plain = sum_of_losses(Objective(), [FIRST, SECOND], REWARDS)
    got = sum_of_losses(Objective(centering=0.1), [FIRST, SECOND], REWARDS)
    # first, of weight ½: (1 + 0)²; second: mean of (1 + 1)², (2 + 1)², (2 + 1)²
    assert (got - plain).item() == pytest.approx(0.1 * (0.5 + 22 / 3))


def test_no_groups_give_a_zero_that_still_has_a_gradient():
    rewards = torch.zeros(0, requires_grad=True)
    loss = sum_of_losses(Objective(), [], rewards)
    loss.backward()
    assert loss.item() == 0
