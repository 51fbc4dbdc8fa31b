"""Win rates at equal length: what length explains is taken out, what it does not is left."""

import numpy as np
import pytest
from scipy.optimize import minimize

from policies.evaluate.measures.length_control import length_controlled_rate


def test_the_fit_is_the_optimum_that_scipy_finds() -> None:
    generator = np.random.default_rng(1)
    wins = generator.choice([0.0, 0.5, 1.0], size=40)
    longer = generator.normal(3, 10, size=40)

    def loss(fit: np.ndarray) -> float:
        chance = 1 / (
            1 + np.exp(-(fit[0] + fit[1] * np.tanh(longer / np.sqrt((longer**2).mean()))))
        )
        likelihood = (wins * np.log(chance) + (1 - wins) * np.log(1 - chance)).sum()
        return -likelihood + 0.5 * (1e-3 * fit[0] ** 2 + 1e-2 * fit[1] ** 2)

    best = minimize(loss, np.zeros(2), tol=1e-10).x
    found = length_controlled_rate(wins, longer, seed=0, samples=50)
    assert found.value == pytest.approx(1 / (1 + np.exp(-best[0])), abs=1e-5)
    assert found.low < found.value < found.high


def test_a_model_that_wins_only_by_being_longer_has_no_merit_at_equal_length() -> None:
    longer = np.repeat([20.0, -20.0], [80, 20])
    # nine in ten where it is longer, one in ten where it is shorter: 74 % in all, 50 % at heart
    wins = np.repeat([1.0, 0.0, 1.0, 0.0], [72, 8, 2, 18])
    found = length_controlled_rate(wins, longer, seed=0, samples=200)
    assert found.value == pytest.approx(0.5, abs=0.01)
    assert found.low < 0.5 < found.high


def test_without_a_difference_of_lengths_it_is_the_plain_win_rate() -> None:
    wins = np.repeat([1.0, 0.5, 0.0], [30, 5, 15])
    found = length_controlled_rate(wins, np.zeros(50), seed=0)
    assert found.value == pytest.approx(0.65, abs=1e-3)
    # the normal interval of a mean: 0.65 ± 1.96 · std / √50
    assert found.high - found.low == pytest.approx(2 * 1.96 * wins.std() / 50**0.5, rel=0.1)


def test_always_winning_stays_finite_and_few_prompts_have_no_interval() -> None:
    assert 0.95 < length_controlled_rate(np.ones(20), np.ones(20), seed=0).value <= 1
    assert np.isnan(length_controlled_rate(np.ones(4), np.ones(4), seed=0).low)
    assert length_controlled_rate(np.ones(5), np.ones(5), seed=0).low > 0.5
