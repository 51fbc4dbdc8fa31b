"""Statistics against numbers worked by hand, and against NumPy written out again."""

from itertools import combinations

import numpy as np
import pytest

from policies.evaluate.measures.statistics import (
    best_of_n,
    best_of_n_nats,
    bootstrap_interval,
    commonest_phrase,
    compare,
    distinct_n,
    judge_wins,
    mean_per_token,
    repeating_fraction,
    self_bleu,
    sign_test,
    spread,
    votes_needed,
)


def test_compare_counts_every_pair_and_half_of_a_tie() -> None:
    policy = np.array([[3.0, 1.0], [0.0, 0.0], [5.0, -5.0]])
    reference = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [9.0, 9.0, 9.0]])
    # prompt 0: 3 beats 2, 1, 0 → 3; 1 loses to 2, ties 1, beats 0 → 1.5; 4.5 of 6
    # prompt 1: each 0 ties one of three → twice ½ of 6; prompt 2: nothing
    np.testing.assert_allclose(
        compare(policy, reference), [4.5 / 6, 1 / 6, 0.0], rtol=0, atol=1e-15
    )


def test_compare_is_antisymmetric() -> None:
    generator = np.random.default_rng(3)
    left, right = generator.integers(0, 4, (20, 3)) * 1.0, generator.integers(0, 4, (20, 5)) * 1.0
    np.testing.assert_allclose(compare(left, right) + compare(right, left), np.ones(20), atol=1e-12)


def test_compare_handles_infinite_scores() -> None:
    infinite = np.array([[np.inf]])
    assert compare(infinite, -infinite).tolist() == [1.0]
    assert compare(infinite, infinite).tolist() == [0.5]


@pytest.mark.parametrize(
    ("policy", "reference", "message"),
    [
        (np.zeros((2, 1)), np.zeros((3, 1)), "2 prompts against 3"),
        (np.zeros((2, 0)), np.zeros((2, 1)), "without a response"),
        (np.array([[np.nan]]), np.zeros((1, 1)), "NaN"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(policy, reference, message) -> None:
    with pytest.raises(ValueError, match=message):
        compare(policy, reference)


@pytest.mark.parametrize(
    ("wins", "message"),
    [([], "no values"), ([1.2], "between 0 and 1"), ([-0.1], "between"), ([np.nan], "between")],
)
def test_win_rate_refuses_what_is_no_share(wins, message) -> None:
    with pytest.raises(ValueError, match=message):
        judge_wins(np.array(wins), seed=0)


def test_bootstrap_of_five_values_is_known_exactly() -> None:
    # The ones drawn are binomial(5, 0.2): P(0) = .328, P(≤ 1) = .737, P(≤ 2) = .942, P(≤ 3) = .993.
    wide = bootstrap_interval(np.array([0.0, 0.0, 1.0, 0.0, 0.0]), seed=0)
    narrow = bootstrap_interval(np.array([0.0, 0.0, 1.0, 0.0, 0.0]), seed=0, level=0.4)
    assert (wide.value, wide.low, wide.high, wide.n) == pytest.approx((0.2, 0.0, 0.6, 5))
    assert (narrow.low, narrow.high, narrow.level) == pytest.approx((0.0, 0.2, 0.4))


def test_bootstrap_agrees_with_a_resampling_written_out_and_with_the_normal_theory() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=100)
    interval = bootstrap_interval(values, samples=20_000, seed=5)
    draws = np.random.default_rng(99).integers(0, 100, size=(20_000, 100))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    half_width = 1.96 * values.std() / 10
    assert interval.low == pytest.approx(low, abs=0.02)
    assert interval.high == pytest.approx(high, abs=0.02)
    assert interval.high - interval.low == pytest.approx(2 * half_width, rel=0.05)


def test_bootstrap_of_skewed_values_takes_the_quantiles_of_the_means_themselves() -> None:
    values = np.array([0.0] * 9 + [10.0])
    interval = bootstrap_interval(values, seed=0)
    # The number of tens drawn is binomial(10, 0.1): P(0) = .349, P(≤ 2) = .930, P(≤ 3) = .987.
    assert (interval.low, interval.high) == (0.0, 3.0)


def test_bootstrap_depends_on_the_seed_alone() -> None:
    values = np.random.default_rng(2).random(30)
    state = np.random.get_state()[1].copy()
    first = bootstrap_interval(values, seed=7)
    assert bootstrap_interval(values, seed=7) == first
    assert bootstrap_interval(values, seed=8) != first
    assert (np.random.get_state()[1] == state).all()


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(11)
    held = 0
    for seed in range(200):
        wins = (generator.random(64) < 0.7).astype(float)
        interval = bootstrap_interval(wins, samples=500, seed=seed)
        held += interval.low <= 0.7 <= interval.high
    assert 0.88 <= held / 200 <= 0.99


def test_fewer_than_five_prompts_have_no_interval_and_none_has_no_mean() -> None:
    for few in (1, 2, 4):
        interval = bootstrap_interval(np.ones(few), seed=0)
        assert (interval.value, interval.n) == (1.0, few)
        assert np.isnan([interval.low, interval.high]).all()
    assert bootstrap_interval(np.ones(5), seed=0).low == 1.0
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval(np.array([]), seed=0)


def test_interval_to_json() -> None:
    plain = bootstrap_interval(np.ones(5), seed=0).to_json()
    assert plain == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 5, "level": 0.95}


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_sign_test_is_the_binomial_tail_twice(wins, losses, expected) -> None:
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-12)


def test_judge_wins_counts_prompts_and_keeps_shares() -> None:
    outcome = judge_wins(np.array([1.0, 0.75, 0.5, 0.25]), seed=0)
    assert outcome["value"] == 0.625
    assert (outcome["wins"], outcome["ties"], outcome["losses"]) == (2, 1, 1)
    assert outcome["p_value"] == 1.0  # 2 · (1 + 3) / 8
    assert outcome["n"] == 4
    assert "interval" not in outcome


def test_spread() -> None:
    values = np.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert spread(values) == {"mean": 5.0, "std": 2.0}


def test_distinct_n_counts_over_all_texts_and_spans_none() -> None:
    texts = ["The cat saw the cat.", "A cat!"]
    # words: the cat saw the cat a cat, 4 different of 7
    # pairs: the-cat twice, cat-saw, saw-the, a-cat, 4 different of 5
    assert distinct_n(texts, 1) == 4 / 7
    assert distinct_n(texts, 2) == 4 / 5
    assert distinct_n(texts, 6) == 0.0
    assert distinct_n([], 1) == 0.0
    assert distinct_n(["", " … "], 1) == 0.0


def test_distinct_n_keeps_contractions_and_other_scripts_whole() -> None:
    assert distinct_n(["don't don\u2019t", "été ÉTÉ"], 1) == 3 / 4


def test_best_of_n_is_the_mean_over_all_choices_of_n() -> None:
    generator = np.random.default_rng(0)
    rewards, gold = generator.normal(size=(3, 5)), generator.normal(size=(3, 5))
    for n in range(1, 6):
        chosen = [
            [gold[p, max(part, key=lambda i: rewards[p, i])] for part in combinations(range(5), n)]
            for p in range(3)
        ]
        np.testing.assert_allclose(best_of_n(rewards, gold, n), np.mean(chosen, axis=1))
    # of 1, 4, 2: the pairs have the best 4, 2 and 4
    np.testing.assert_allclose(best_of_n(np.array([[1.0, 4.0, 2.0]]), np.ones((1, 3)) * 3, 2), 3)
    values = np.array([[1.0, 4.0, 2.0]])
    np.testing.assert_allclose(best_of_n(values, values, 2), (4 + 2 + 4) / 3)


def test_among_equal_rewards_chance_chooses() -> None:
    # best of 2 of a, b, c with rewards 1, 1, 0: {a, b} either, {a, c} a, {b, c} b
    gold = np.array([[0.0, 6.0, 100.0]])
    expected = (3 + 0 + 6) / 3
    np.testing.assert_allclose(best_of_n(np.array([[1.0, 1.0, 0.0]]), gold, 2), expected)
    turned = best_of_n(np.array([[0.0, 1.0, 1.0]]), gold[:, ::-1], 2)
    np.testing.assert_allclose(turned, expected)


def test_the_best_of_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="the best of 3 cannot be taken from 2 responses"):
        best_of_n(np.ones((1, 2)), np.ones((1, 2)), 3)


def test_best_of_n_nats() -> None:
    assert best_of_n_nats(1) == 0
    assert best_of_n_nats(4) == pytest.approx(1.3862943611 - 0.75)


def test_the_commonest_phrase_counts_once_a_text() -> None:
    texts = ["So glad to be here. So glad to be here!", "I'm so glad to be", "Too short."]
    assert commonest_phrase(texts, ["", "", ""]) == ("so glad to be", 2 / 3)
    assert commonest_phrase(["one two three four five"], [""]) == ("one two three four", 1.0)
    assert commonest_phrase(["a b c", ""], ["", ""]) == ("", 0.0)
    assert commonest_phrase([], []) == ("", 0.0)


def test_what_an_answer_quotes_from_its_own_prompt_is_no_template() -> None:
    texts = ["I went to the zoo. I fed the goats.", "I went to the zoo. I saw a lion."]
    prompts = ["Continue: I went to the zoo.", "Continue: She went to a bar."]
    # what the first text quotes counts in the second, whose prompt does not have it
    assert commonest_phrase(texts, prompts) == ("to the zoo i", 1.0)
    assert commonest_phrase(texts, prompts, n=5) == ("went to the zoo i", 1.0)
    assert commonest_phrase(texts[:1], ["I went to the zoo. I fed the goats."]) == ("", 0.0)


def test_a_text_repeats_itself_where_four_words_come_again() -> None:
    texts = ["so glad to be so glad to be", "so glad to be", "glad to be so glad to be", ""]
    assert repeating_fraction(texts) == 1 / 4
    assert repeating_fraction([]) == 0.0


def test_self_bleu_is_one_for_copies_and_small_for_strangers() -> None:
    copies = ["the dog sat on the old red mat"] * 3
    assert self_bleu(copies) == pytest.approx(1.0)
    assert self_bleu(["one two three four five", "six seven eight nine ten"]) < 0.15
    assert self_bleu(["alone"]) == 0.0


def test_votes_needed_is_the_sample_size_of_a_z_test() -> None:
    # eight votes of ten and one for each side: m = 9/12, s² = 9/12·3/12, z = 1.95996 + 0.84162
    votes = np.repeat([1.0, 0.0], [8, 2])
    assert votes_needed(votes) == int(np.ceil(2.801585**2 * 0.1875 / 0.0625))
    assert votes_needed(1 - votes) == votes_needed(votes)
    assert votes_needed(np.array([1.0, 0.0])) is None
    assert votes_needed(np.ones(3)) > 3  # three of three prove nothing yet


def test_nats_per_token_are_a_ratio_of_sums_and_its_interval_resamples_texts() -> None:
    nats, tokens = np.array([2.0, 9.0, 4.0, 3.0, 12.0, 6.0]), np.array([1.0, 3, 4, 1, 6, 3])
    found = mean_per_token(nats, tokens, seed=3)
    assert found.value == 2.0  # 36 nats, 18 tokens
    drawn = np.random.default_rng(8).integers(0, 6, (40_000, 6))
    ratios = nats[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)
    assert found.n == 6
    same = mean_per_token(2 * tokens, tokens, seed=3)
    assert (same.low, same.value, same.high) == (2.0, 2.0, 2.0)
    assert np.isnan(mean_per_token(nats[:4], tokens[:4], seed=3).low)
