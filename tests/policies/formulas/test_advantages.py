import numpy as np
import torch

from policies.formulas import (
    generalized_advantages,
    group_relative,
    leave_one_out,
    masked_moments,
    whiten,
)

MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_advantages_of_a_terminal_reward_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    values = torch.tensor([[0.5, 0.25, 0.5], [0.5, 9.0, 9.0]])
    advantages, returns = generalized_advantages(rewards, values, MASK, gamma=1.0, gae_lambda=0.5)
    # row 1: δ = (0.25 − 0.5, 0.5 − 0.25, 1 − 0.5) = (−.25, .25, .5)
    # A₃ = .5, A₂ = .25 + ½ · .5, A₁ = −.25 + ½ · .5
    assert torch.allclose(advantages, torch.tensor([[0.0, 0.5, 0.5], [1.5, 0.0, 0.0]]))
    assert torch.allclose(returns, torch.tensor([[0.5, 0.75, 1.0], [2.0, 0.0, 0.0]]))


def test_advantages_equal_the_sum_over_future_deltas() -> None:
    generator = np.random.default_rng(0)
    gamma, lam, length = 0.9, 0.8, 7
    rewards = generator.normal(size=(4, length))
    values = generator.normal(size=(4, length))
    lengths = [7, 5, 1, 3]
    expected = np.zeros((4, length))
    for row, end in enumerate(lengths):
        for t in range(end):
            for k in range(t, end):
                following = values[row, k + 1] if k + 1 < end else 0.0
                delta = rewards[row, k] + gamma * following - values[row, k]
                expected[row, t] += (gamma * lam) ** (k - t) * delta
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    advantages, _ = generalized_advantages(
        torch.tensor(rewards), torch.tensor(values), mask, gamma=gamma, gae_lambda=lam
    )
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)


def test_with_lambda_one_the_return_is_the_discounted_reward() -> None:
    rewards = torch.tensor([[0.0, 0.0, 8.0]])
    values = torch.tensor([[3.0, -1.0, 0.7]])
    _, returns = generalized_advantages(
        rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, gae_lambda=1.0
    )
    assert torch.allclose(returns, torch.tensor([[2.0, 4.0, 8.0]]))


def test_whitening_looks_at_real_tokens_only() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, 100.0, -100.0]])
    count, total, squares = masked_moments(values, MASK).tolist()
    assert (count, total, squares) == (4.0, 12.0, 50.0)
    # mean 3, biased variance 50/4 − 9 = 3.5
    white = whiten(values, MASK, 3.0, 3.5)
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / 3.5**0.5
    assert torch.allclose(white, expected, atol=1e-6)


def test_each_response_is_compared_with_the_others_of_its_prompt() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]])
    # 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2
    assert leave_one_out(rewards).tolist() == [[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0]]


def test_a_group_is_centered_and_scaled() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]])
    # mean 3, unbiased variance (4 + 1 + 9)/2 = 7
    expected = torch.tensor([[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]])
    assert torch.equal(group_relative(rewards, scale=False), expected)
    scaled = group_relative(rewards, scale=True)
    torch.testing.assert_close(scaled, expected / (7**0.5 + 1e-4), rtol=1e-6, atol=0.0)
