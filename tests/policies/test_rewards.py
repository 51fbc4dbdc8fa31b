import torch

from policies.rewards import center, penalize_missing_eos, place_at_end


def test_centering_takes_off_the_mean_of_the_stored_rewards() -> None:
    centered = center(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [2.0, 4.0]]))
    assert centered.tolist() == [0.5, -3.0]


def test_a_missing_end_costs_the_penalty() -> None:
    scores = penalize_missing_eos(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 0.25)
    assert scores.tolist() == [1.0, 0.75]


def test_the_score_sits_on_the_last_real_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    rewards = place_at_end(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.0]]
