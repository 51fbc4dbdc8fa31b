import numpy as np
import pytest
import torch

from reward.losses import bradley_terry, sum_of_prompt_means


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


def test_every_prompt_counts_once_whatever_its_number_of_pairs():
    # prompt 0, weights 1 and 3: (1·1 + 3·2) / 4 = 1.75; prompt 1: (4 + 6) / 2 = 5; prompt 2: 10
    got = sum_of_prompt_means(
        tensor(1, 2, 4, 6, 10), tensor(1, 3, 1, 1, 0.2), torch.tensor([0, 0, 1, 1, 2])
    )
    assert got.item() == pytest.approx(1.75 + 5 + 10)


def test_no_pairs_give_a_zero_that_still_has_a_gradient():
    rewards = torch.zeros(0, requires_grad=True)
    loss = sum_of_prompt_means(rewards, torch.zeros(0), torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
