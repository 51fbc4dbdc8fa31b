import pytest

from reward.accuracy import count_right, pair_accuracy
from reward.data.groups import Group, Pair


def group(*pairs):
    return Group("p", (1,), ((2,), (3,), (4,)), tuple(Pair(*pair, 0, "ann") for pair in pairs))


def test_ties_are_left_out_and_equal_rewards_count_half():
    judged = group((0, 1, 1.0), (1, 2, 1.0), (0, 2, 0.5), (2, 0, 1.0))
    # rewards 2, 1, 1: 0 > 1 right, 1 against 2 equal (half), the tie is left out, 2 > 0 wrong
    assert count_right(judged, [2.0, 1.0, 1.0]) == (1.5, 3)
    accuracy = pair_accuracy([judged], [[2.0, 1.0, 1.0]])
    assert accuracy.value == 0.5
    assert (accuracy.pairs, accuracy.prompts) == (3, 1)


def test_interval_of_a_coin_matches_the_normal_approximation():
    # 400 prompts of one pair, half of them right: 0.5 ± 1.96·√(0.25/400) = 0.5 ± 0.049
    groups = [group((0, 1, 1.0))] * 400
    rewards = [[float(n % 2), 0.5, 0.0] for n in range(400)]
    accuracy = pair_accuracy(groups, rewards)
    assert accuracy.value == 0.5
    assert accuracy.low == pytest.approx(0.451, abs=0.006)
    assert accuracy.high == pytest.approx(0.549, abs=0.006)


def test_pairs_of_one_prompt_widen_the_interval():
    # the same 400 pairs, but four to a prompt that are right or wrong together: √4 times as wide
    groups = [group(*[(0, 1, 1.0)] * 4)] * 100
    rewards = [[float(n % 2), 0.5, 0.0] for n in range(100)]
    accuracy = pair_accuracy(groups, rewards)
    assert accuracy.pairs == 400
    assert accuracy.high - accuracy.low == pytest.approx(4 * 0.049, abs=0.02)


@pytest.mark.parametrize(("prompts", "low"), [(1, None), (4, None), (5, 1.0)])
def test_few_prompts_have_no_interval(prompts, low):
    accuracy = pair_accuracy([group((0, 1, 1.0))] * prompts, [[1.0, 0.0, 0.0]] * prompts)
    assert (accuracy.value, accuracy.low, accuracy.high) == (1.0, low, low)


def test_only_ties_have_no_accuracy():
    assert pair_accuracy([group((0, 1, 0.5))], [[0.0, 1.0, 2.0]]) is None
