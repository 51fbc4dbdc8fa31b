import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from reward.data.batches import to_judgments, to_pair_tensors, to_ranking_tensors, total_weight
from reward.data.groups import Group, Pair, TieredRanking
from reward.losses import (
    Objective,
    bradley_terry,
    plackett_luce,
    rank_targets,
    regression,
    sum_of_losses,
    sum_of_prompt_means,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_by_hand():
    # d = 1: −log σ(1) = log(1 + e⁻¹) = 0.3132617; a tie at d = 1 averages 0.3132617 and 1.3132617;
    # margin 1 at d = 1 leaves −log σ(0) = log 2; second won at d = 1: −log σ(−1) = 1.3132617.
    got = bradley_terry(
        tensor(1, 1, 1, 1), tensor(0, 0, 0, 0), tensor(1, 0.5, 1, 0), tensor(0, 0, 1, 0)
    )
    expected = [0.31326168751822286, 0.8132616875182228, 0.6931471805599453, 1.3132616875182228]
    assert got.tolist() == pytest.approx(expected, abs=1e-14)


def test_bradley_terry_against_numpy():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 50)) * 5
    outcome = generator.choice([0.0, 0.5, 1.0], size=50)
    margin = np.where(outcome == 0.5, 0, generator.uniform(0, 2, size=50))
    probability = 1 / (1 + np.exp(-(first - second - margin)))
    other = 1 / (1 + np.exp(-(second - first - margin)))
    expected = -outcome * np.log(probability) - (1 - outcome) * np.log(other)
    got = bradley_terry(*(torch.from_numpy(a) for a in (first, second, outcome, margin)))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-15)


def test_gradient_raises_the_winner_and_pulls_ties_together():
    first, second = tensor(0, 2).requires_grad_(), tensor(0, 0)
    bradley_terry(first, second, tensor(1, 0.5), tensor(0, 0)).sum().backward()
    # winner: −(1 − σ(0)) = −½, descent raises it
    # tie at d = 2: ½(σ(2) − σ(−2)) > 0, descent lowers it
    assert first.grad.tolist() == pytest.approx([-0.5, 0.38079707797788], abs=1e-12)


def test_loss_is_finite_for_huge_differences():
    got = bradley_terry(tensor(-1e4), tensor(1e4), tensor(1), tensor(0))
    assert got.tolist() == [2e4]


def test_every_prompt_counts_once_whatever_its_number_of_pairs_but_for_their_weights():
    # prompt 0, weights 1 and 3: (1·1 + 3·2) / 2 = 3.5; prompt 1: (4 + 6) / 2 = 5; prompt 2: .2·10
    got = sum_of_prompt_means(
        tensor(1, 2, 4, 6, 10), tensor(1, 3, 1, 1, 0.2), torch.tensor([0, 0, 1, 1, 2]), 4
    )
    assert got.item() == pytest.approx(3.5 + 5 + 2)


# ---- whole rankings ----


def by_orders(rewards, tiers):
    """Plackett-Luce by its definition, one strict tier at a time."""
    left = [r for tier in tiers for r in tier]
    total = 0.0
    for tier in tiers:
        for number in range(len(tier)):
            weights = np.exp(left).sum() - number / len(tier) * np.exp(tier).sum()
            total += np.log(weights) - tier[number]
        left = left[len(tier) :]
    assert not left
    assert len(rewards) == sum(map(len, tiers))
    return total


def test_plackett_luce_against_its_definition():
    rewards = np.random.default_rng(0).normal(size=(3, 5)) * 2
    tier = torch.tensor([[0, 1, 2, 3, 4], [1, 0, 1, 2, 1], [1, 0, -1, 0, -1]])
    a, b, c = rewards
    expected = [
        by_orders(a, [[a[0]], [a[1]], [a[2]], [a[3]], [a[4]]]),
        by_orders(b, [[b[1]], [b[0], b[2], b[4]], [b[3]]]),
        by_orders([c[1], c[3], c[0]], [[c[1], c[3]], [c[0]]]),
    ]
    got = plackett_luce(torch.from_numpy(rewards), tier)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_plackett_luce_probabilities_of_all_orders_sum_to_1():
    rewards = tensor(0.3, -1.2, 2.0).expand(6, 3)
    tier = torch.tensor(list(itertools.permutations(range(3))))
    total = (-plackett_luce(rewards, tier)).exp().sum()
    assert total.item() == pytest.approx(1)


def test_plackett_luce_of_two_is_bradley_terry():
    rewards = tensor(0.7, -0.4)
    got = plackett_luce(rewards.expand(2, 2), torch.tensor([[0, 1], [0, 0]]))
    won, tied = bradley_terry(rewards[:1].expand(2), rewards[1:].expand(2), tensor(1, 0.5), 0)
    # Efron's tie: 2·log(e^a + e^b) − log 2 − a − b, twice that of Bradley-Terry less log 2
    assert got.tolist() == pytest.approx([won.item(), 2 * tied.item() - np.log(2)])


def test_plackett_luce_is_finite_and_has_the_right_gradient_for_huge_differences():
    rewards = tensor(-1e4, 1e4, 0.0).requires_grad_()
    loss = plackett_luce(rewards.unsqueeze(0), torch.tensor([[0, 1, 2]])).sum()
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert rewards.grad.tolist() == pytest.approx([-1, 1, 0])


def test_rank_targets_by_hand():
    tier = torch.tensor([[0, 1, 2], [1, 0, 1], [0, 0, -1], [0, -1, -1]])
    # ranks: 0 1 2 · 1.5 0 1.5 · 0.5 0.5 · alone
    assert rank_targets(tier).tolist() == [[1, 0, -1], [-0.5, 1, -0.5], [0, 0, 0], [0, 0, 0]]


def test_regression_by_hand():
    rewards = tensor(1, 2, 9).expand(1, 3)
    got = regression(rewards, tensor(0, 4, 0).expand(1, 3), torch.tensor([[True, True, False]]))
    assert got.tolist() == [(1 + 4) / 2]


# ---- all judgments of a forward pass ----

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


def loss_of(objective, groups, rewards):
    return sum_of_losses(objective, to_judgments(groups, objective.loss, CPU), rewards)


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
    got = loss_of(Objective(), [FIRST, SECOND], REWARDS)
    assert got.item() == pytest.approx(WON_BY_1 / 2 + (math.log(2) + 2 * WON_BY_1) / 3)


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce", "regression"])
def test_the_weight_of_a_batch_is_that_of_each_prompts_mean_judgment(loss):
    assert total_weight([FIRST, SECOND], loss) == 1.5
    assert total_weight([SECOND] * 3, loss) == 3
    assert total_weight([], loss) == 0


def test_margin_counts_steps_of_strength():
    # the first pair has strength 2: margin 2·0.5 = 1 takes its whole lead away; its weight is ½
    got = loss_of(Objective(margin=0.5), [FIRST], REWARDS[:2])
    assert got.item() == pytest.approx(math.log(2) / 2)


def test_whole_rankings_by_hand():
    # first, of weight ½: won by 1;
    # second: log(e² + 2e) − 2, then a tie of equal rewards: 2·log 2 − log 2
    got = loss_of(Objective("plackett_luce"), [FIRST, SECOND], REWARDS)
    tie = math.log(2)
    expected = WON_BY_1 / 2 + math.log(math.exp(2) + 2 * math.e) - 2 + tie
    assert got.item() == pytest.approx(expected)


def test_regression_to_ranks_by_hand():
    # first, of weight ½: 1 against 1 and 0 against −1: (0 + 1)/2;
    # second: 2 against 1, 1 and 1 against −½: 5.5/3
    got = loss_of(Objective("regression"), [FIRST, SECOND], REWARDS)
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
    got = loss_of(Objective("regression"), scored, REWARDS)
    assert got.item() == pytest.approx(0.625 / 2 + 1.75)


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce"])
def test_scores_change_no_other_loss(loss):
    scored = [with_scores(FIRST, 2, 1), with_scores(SECOND, 1.5, 0, -1)]
    expected = loss_of(Objective(loss), [FIRST, SECOND], REWARDS)
    assert torch.equal(loss_of(Objective(loss), scored, REWARDS), expected)


def test_centering_adds_the_squared_sum_of_each_pair():
    plain = loss_of(Objective(), [FIRST, SECOND], REWARDS)
    got = loss_of(Objective(centering=0.1), [FIRST, SECOND], REWARDS)
    # first, of weight ½: (1 + 0)²; second: mean of (1 + 1)², (2 + 1)², (2 + 1)²
    assert (got - plain).item() == pytest.approx(0.1 * (0.5 + 22 / 3))


def test_no_groups_give_a_zero_that_still_has_a_gradient():
    rewards = torch.zeros(0, requires_grad=True)
    loss = loss_of(Objective(), [], rewards)
    loss.backward()
    assert loss.item() == 0
