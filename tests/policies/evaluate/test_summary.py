"""Groups of prompts, win rates with unclear verdicts, and the best-of-n curve."""

import numpy as np
import pytest

from policies.evaluate.responses import ModelResponses
from policies.evaluate.summary import (
    best_of_n_curve,
    length_groups,
    measure_responses,
    win_rates,
    win_rates_within,
)
from policies.sampling.generate import Sample
from rlhf.records.schema import Sampling


def answers(*lengths: int) -> ModelResponses:
    """One answer of each length, ended where the length is even."""
    samples = [[Sample([7] * length, finished=length % 2 == 0)] for length in lengths]
    return ModelResponses({}, samples, [[f"word{length}"] for length in lengths], Sampling())


def test_length_groups_are_quarters_named_by_what_is_in_them() -> None:
    lengths = [5, 5, 6, 7, 8, 8, 9, 9, 12, 13, 14, 15, 20, 30, 31, 40]
    names = length_groups(lengths)
    assert list(dict.fromkeys(names)) == [
        "5–7 tokens",
        "8–9 tokens",
        "12–15 tokens",
        "20–40 tokens",
    ]
    assert length_groups([3, 9, 4]) == ["3–9 tokens"] * 3
    assert length_groups([6] * 16) == ["6 tokens"] * 16


def test_win_rates_leave_unclear_verdicts_out_and_count_them() -> None:
    wins = {"ai": np.array([1.0, np.nan, 0.0, 1.0]), "silent": np.full(4, np.nan)}
    rates = win_rates(wins, answers(2, 2, 2, 2), answers(2, 2, 2, 2), seed=0)
    assert set(rates) == {"ai"}
    assert rates["ai"]["value"] == pytest.approx(2 / 3)
    assert (rates["ai"]["n"], rates["ai"]["unclear"]) == (3, 1)
    assert rates["ai"]["length_controlled"]["n"] == 3


def test_a_judge_of_first_answers_is_held_to_their_lengths() -> None:
    random = np.random.default_rng(0)
    first, second, theirs = (random.integers(1, 40, 300) for _ in range(3))
    samples = [
        [Sample([7] * a, True), Sample([7] * b, True)] for a, b in zip(first, second, strict=True)
    ]
    ours = ModelResponses({}, samples, [["a", "b"]] * 300, Sampling())
    longer = (first > theirs) + 0.5 * (first == theirs)
    ours_wins = np.where(random.random(300) < 0.3, 1.0, longer)  # else the longer answer wins
    rates = win_rates({"ai": ours_wins, "gold": ours_wins}, ours, answers(*theirs), seed=0)
    alone = win_rates({"gold": ours_wins}, answers(*first), answers(*theirs), seed=0)
    assert rates["ai"]["length_controlled"] == alone["gold"]["length_controlled"]
    assert rates["ai"]["length_controlled"] != rates["gold"]["length_controlled"]


def test_win_rates_within_groups() -> None:
    wins = {"gold": np.array([1.0, 0.0, 0.5, np.nan])}
    found = win_rates_within(wins, ["b", "a", "b", "c"], ["a", "b", "c"], seed=0)
    assert {name: rate["value"] for name, rate in found["gold"].items()} == {"a": 0.0, "b": 0.75}
    assert list(found["gold"]) == ["a", "b"]


def test_every_model_is_measured() -> None:
    scores = {"gold": {"policy": np.array([[1.0], [3.0]]), "reference": np.array([[0.0], [0.0]])}}
    found = measure_responses(
        {"policy": answers(2, 4), "reference": answers(3, 4)}, scores, ["", ""]
    )
    assert found["length"] == {"policy": 3.0, "reference": 3.5}
    assert found["eos_rate"] == {"policy": 1.0, "reference": 0.5}
    assert found["gold"]["policy"] == {"mean": 2.0, "std": 1.0}
    assert found["scores"]["gold"]["policy"] == [1.0, 3.0]
    assert found["distinct"]["policy"]["distinct_1"] == 1.0
    assert found["template"]["policy"] == {"words": "", "share": 0.0}
    assert found["repeats"] == {"policy": 0.0, "reference": 0.0}


def test_the_best_of_n_curve_chooses_by_reward_and_scores_by_every_judge() -> None:
    scores = {
        "reward": {"reference": np.array([[0.0, 1.0], [4.0, 2.0]])},
        "gold": {"reference": np.array([[5.0, 7.0], [1.0, 3.0]])},
    }
    first, second = best_of_n_curve(scores)
    assert first == {"n": 1, "nats": 0.0, "reward": 1.75, "gold": 4.0}
    assert (second["reward"], second["gold"]) == (2.5, 4.0)  # gold of the two best by reward: 7, 1
    assert second["nats"] == pytest.approx(np.log(2) - 0.5)
