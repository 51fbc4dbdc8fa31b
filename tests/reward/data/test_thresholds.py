"""b: where a source of thumbs draws the line between good and bad."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from reward.data.groups import Group, Pointwise
from reward.data.thresholds import MEMORY, MIN_OF_EACH, OTHERS, Thresholds, gradient, solve
from rlhf.errors import InputError
from tests.reward.conftest import stored


def group(name, *said, annotator="ann", weight=1.0):
    """A prompt with one response for every thumb."""
    judged = tuple(
        Pointwise(number, bool(good), annotator, "thumbs", weight)
        for number, good in enumerate(said)
    )
    return Group(name, (1,), tuple((2,) for _ in said), pointwise=judged)


def of_both(annotator, number=MIN_OF_EACH):
    return group(annotator, *[1] * number, *[0] * number, annotator=annotator)


def loss(b, rewards, good, weights):
    signs = np.where(good, 1, -1)
    return float((weights * np.log1p(np.exp(-signs * (rewards - b)))).sum())


def test_the_gradient_is_that_of_the_loss():
    rewards, good = np.array([0.3, -2.0, 4.0]), np.array([1.0, 0.0, 0.0])
    weights = np.array([1.0, 0.5, 2.0])
    step = 1e-6
    numeric = (
        loss(0.7 + step, rewards, good, weights) - loss(0.7 - step, rewards, good, weights)
    ) / (2 * step)
    assert (weights * gradient(rewards, good, 0.7)).sum() == pytest.approx(numeric, abs=1e-8)


def test_the_best_b_by_hand():
    # rewards of 2 alone: an up and three downs, half of each added, give odds of 3½ to 1½ against
    b = solve(np.full(4, 2.0), np.array([1.0, 0, 0, 0]), np.ones(4))
    assert b == pytest.approx(2 + math.log(3.5 / 1.5))


def test_the_best_b_is_the_minimum_of_the_loss():
    dice = np.random.default_rng(0)
    rewards = dice.normal(3, 2, size=200)
    good = (dice.random(200) < 1 / (1 + np.exp(2.5 - rewards))).astype(float)
    weights = dice.choice([0.5, 1.0, 3.0], size=200)
    more = np.append(rewards, [rewards.mean()] * 2), np.append(good, [1, 0])
    heavier = np.append(weights, [weights.mean() / 2] * 2)
    best = minimize_scalar(lambda b: loss(b, *more, heavier), options={"xtol": 1e-10}).x
    b = solve(rewards, good, weights)
    assert b == pytest.approx(best, abs=1e-5)
    assert b == pytest.approx(2.5, abs=0.4)
    assert solve(rewards, good, 0.1 * weights) == pytest.approx(b)  # only ratios of weights count


@pytest.mark.parametrize("said", [0.0, 1.0])
def test_b_is_finite_where_a_sample_says_one_thing(said):
    b = solve(np.linspace(-1, 1, 100), np.full(100, said), np.ones(100))
    assert 3 < abs(b) < 8


def test_who_gave_enough_of_both_has_a_threshold_of_her_own():
    few = [group("few", 1, 0, annotator="few"), group("one", 1, annotator="one")]
    found = Thresholds(
        stored([of_both("ann"), of_both("bob"), of_both("cid", MIN_OF_EACH - 1), *few])
    )
    assert found.sources == ["ann", "bob", OTHERS]
    assert [found.source(name) for name in ("ann", "cid", "few", "new")] == ["ann", *[OTHERS] * 3]
    assert all(found.is_fitted(source) for source in found.sources)
    assert found.numbers([*few, of_both("bob", 1)]).tolist() == [2, 2, 2, 1, 1]


def test_no_thumbs_no_thresholds():
    assert Thresholds(stored([Group("a", (1,), ((2,),))])).sources == []
    assert Thresholds(stored([of_both("ann")])).sources == ["ann"]  # nobody is left over


def scoring(groups, rewards):
    """Gives these rewards of these groups."""
    known = {one.prompt_id: row for one, row in zip(groups, rewards, strict=True)}
    return lambda sample: [known[one.prompt_id] for one in sample]


def test_what_says_one_thing_is_measured_against_the_mean_reward():
    groups = [of_both("ann", 8), group("bad", 0, 0, annotator="bob"), Group("pair", (1,), ((2,),))]
    found = Thresholds(stored(groups))
    assert [found.is_fitted(source) for source in found.sources] == [True, False]
    rewards = [[1.0] * 8 + [0.0] * 8, [-1.0, 0.0], [12.0]]
    level = found.fit(stored(groups), scoring(groups, rewards))
    assert level == pytest.approx((8 - 1 + 12) / 19)
    assert found.values(level) == {"ann": pytest.approx(0.5), OTHERS: level}
    assert found.of(groups, level).tolist() == pytest.approx([0.5] * 16 + [1.0] * 2)
    again = found.update(groups[1:], [[5.0, 6.0], [7.0]])
    assert found.values(again) == {"ann": pytest.approx(6 + 0.5 - level), OTHERS: 6}


def test_offsets_move_by_four_times_the_mean_gradient_by_hand():
    groups = [of_both("ann", 8), group("more", 1, 0, weight=2.0)]
    found = Thresholds(stored(groups))
    found.fit(stored(groups[:1]), scoring(groups[:1], [[0.0] * 16]))
    assert found.state() == {"ann": [pytest.approx(0, abs=1e-9), 16]}
    # rewards of 4 and 2: level 3, gradients 1 − σ(1) and −σ(−1), which cancel
    assert found.update(groups[1:], [[4.0, 2.0]]) == 3
    assert found.state() == {"ann": [pytest.approx(0, abs=1e-9), 18]}
    # both 3 above the level that a third response makes: gradients ½ and −½ of b, no move; two ups
    ups = [group("ups", 1, 1), Group("pair", (1,), ((2,), (3,)))]
    found.update(ups, [[1.0, 1.0], [-1.0, -1.0]])
    sigma = 1 / (1 + np.exp(-1.0))
    assert found.state() == {"ann": [pytest.approx(-4 * (1 - sigma) * 2 / 20), 20]}
    found.update(ups[1:], [[9.0, 9.0]])  # a batch without thumbs
    assert found.state() == {"ann": [pytest.approx(-4 * (1 - sigma) * 2 / 20), 20]}


def test_a_shift_of_all_rewards_shifts_b_as_far_at_once():
    groups = [group(str(n), 1, 0, 0) for n in range(20)]
    moved = []
    for shift in (0.0, 12.0):
        found = Thresholds(stored(groups))
        found.fit(stored(groups), scoring(groups, [[1.0, 0.0, -1.0]] * 20))
        rewards = [[1.0 + shift, 0.5 + shift, -1.0 + shift]] * 4
        moved.append(found.values(found.update(groups[:4], rewards))["ann"])
    assert moved[1] == pytest.approx(moved[0] + 12)


def test_following_finds_the_best_b():
    dice = np.random.default_rng(1)
    groups = [group(str(n), *(dice.random(16) < 0.7)) for n in range(40)]
    found = Thresholds(stored(groups))
    good = np.array([[one.is_good for one in g.pointwise] for g in groups], dtype=float)
    for spread in (0.1, 3.0):
        rewards = dice.normal(0, spread, size=(40, 16))
        rewards += 5 - rewards.mean(axis=1, keepdims=True)  # of one level
        for n in [*range(40)] * 2:
            level = found.update([groups[n]], [rewards[n].tolist()])
        best = solve(rewards.ravel(), good.ravel(), np.ones(640))
        assert found.values(level)["ann"] == pytest.approx(best, abs=0.3)


def test_a_batch_of_more_thumbs_than_the_memory_does_not_overshoot():
    groups = [group(str(n), 1, 1, 0) for n in range(MEMORY)]
    found = Thresholds(stored(groups))
    for _ in range(60):
        level = found.update(groups, [[3.0, 3.0, 3.0]] * MEMORY)
    assert found.values(level)["ann"] == pytest.approx(3 - math.log(2), abs=1e-3)


def test_a_checkpoint_brings_back_the_same_numbers():
    groups = [of_both("ann"), group("b", 0, annotator="bob")]
    found, again = Thresholds(stored(groups)), Thresholds(stored(groups))
    found.fit(stored(groups), scoring(groups, [list(np.linspace(0, 1, 16)), [0.1]]))
    again.restore(found.state())
    assert again.state() == found.state()
    assert again.values(0.7) == found.values(0.7)


def test_a_checkpoint_that_lacks_a_source_is_refused():
    found = Thresholds(stored([of_both("ann"), of_both("bob")]))
    with pytest.raises(InputError) as caught:
        found.restore({"ann": [0.5, 16]})
    assert str(caught.value) == (
        "The checkpoint has no threshold for the thumbs of bob\n"
        "  It comes from a run without them: start again in another --out."
    )


def test_every_source_is_scored_to_be_fitted():
    groups = [group(f"a{n}", 1, 0) for n in range(2 * MEMORY)]
    groups += [of_both("bob"), *(Group(f"p{n}", (1,), ((2,),)) for n in range(10))]
    scored = []

    def score(sample):
        scored.extend(sample)
        return [[0.0] * len(one.responses) for one in sample]

    Thresholds(stored(groups)).fit(stored(groups), score)
    assert MEMORY < len(scored) <= MEMORY + 11
    assert groups[2 * MEMORY] in scored
