import pytest
import torch

from policies.formulas import center, penalize_missing_eos, place_at_end, preference, shape_rewards
from policies.rewards import combine


def test_centering_takes_off_the_mean_of_the_stored_rewards() -> None:
    centered = center(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [2.0, 4.0]]))
    assert centered.tolist() == [0.5, -3.0]


def test_a_missing_end_costs_the_penalty() -> None:
    scores = penalize_missing_eos(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 0.25)
    assert scores.tolist() == [1.0, 0.75]


def test_a_missing_end_can_have_a_reward_of_its_own() -> None:
    shaped, baseline = shape_rewards(
        torch.tensor([5.0, 4.0]),
        torch.tensor([[1.0], [1.0]]),
        torch.tensor([True, False]),
        torch.tensor([10, 20]),
        shaping="centered",
        missing_eos_penalty=0.25,
        missing_eos_reward=-1.0,
        length_penalty=0.1,
    )
    assert shaped.tolist() == [3.0, -3.0]  # 5 − 1 − 10·.1; −1 − 20·.1
    assert baseline.tolist() == [1.0, 1.0]


def test_the_score_sits_on_the_last_real_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    rewards = place_at_end(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.0]]


def test_par_is_the_mean_probability_of_being_preferred() -> None:
    # σ(0) = ½, σ(ln 3) = ¾, σ(−ln 3) = ¼
    log_3 = 1.0986123
    found = preference(torch.tensor([0.0, 0.0]), torch.tensor([[0.0, -log_3], [log_3, log_3]]))
    assert found.tolist() == pytest.approx([0.625, 0.25])


def test_several_rewards_become_one() -> None:
    scores, weights = torch.tensor([[1.0, 4.0], [3.0, -1.0]]), torch.tensor([1.0, 2.0])
    assert combine(scores, weights, "sum").tolist() == [7.0, 2.0]
    assert combine(scores, weights, "mean").tolist() == [3.5, 1.0]
    assert combine(scores, weights, "worst").tolist() == [1.0, -2.0]


def test_shaping_centres_then_penalises_then_clips() -> None:
    shaped, baseline = shape_rewards(
        torch.tensor([5.0, 1.0]),
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([True, False]),
        torch.tensor([10, 20]),
        shaping="centered",
        missing_eos_penalty=1.0,
        length_penalty=0.05,
        limit=2.0,
    )
    assert baseline.tolist() == [1.5, 0.0]
    assert shaped.tolist() == [2.0, -1.0]  # 5 − 1.5 − .5 = 3, clipped; 1 − 1 − 1
    par, baseline = shape_rewards(
        torch.tensor([1.0]),
        torch.tensor([[1.0]]),
        torch.tensor([True]),
        torch.tensor([1]),
        shaping="par",
    )
    assert (par.tolist(), baseline.tolist()) == ([0.5], [0.0])
