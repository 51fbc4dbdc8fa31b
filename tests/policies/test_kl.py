import pytest

from policies.kl import adjust
from policies.settings import KLSettings


def test_the_controller_moves_by_at_most_a_fifth_of_the_horizons_share() -> None:
    kl = KLSettings(target=0.02, horizon=100)
    assert adjust(0.5, 0.022, 10, kl) == pytest.approx(0.5 * (1 + 0.1 * 10 / 100))
    assert adjust(0.5, 9.0, 10, kl) == pytest.approx(0.5 * (1 + 0.2 * 10 / 100))
    assert adjust(0.5, -1.0, 10, kl) == pytest.approx(0.5 * (1 - 0.2 * 10 / 100))


def test_without_a_target_the_coefficient_stays() -> None:
    assert adjust(0.5, 9.0, 10, KLSettings()) == 0.5
