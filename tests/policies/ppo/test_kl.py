from dataclasses import replace
from pathlib import Path

import pytest

from policies.ppo.kl import adjust
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from rlhf.errors import ConfigError
from tests.settings import changed


def test_the_controller_moves_by_at_most_a_fifth_of_the_horizons_share() -> None:
    kl = KLSettings(target=0.02, horizon=100)
    assert adjust(0.5, 0.022, 10, kl) == pytest.approx(0.5 * (1 + 0.1 * 10 / 100))
    assert adjust(0.5, 9.0, 10, kl) == pytest.approx(0.5 * (1 + 0.2 * 10 / 100))
    assert adjust(0.5, -1.0, 10, kl) == pytest.approx(0.5 * (1 - 0.2 * 10 / 100))


def test_without_a_target_the_coefficient_stays() -> None:
    assert adjust(0.5, 9.0, 10, KLSettings()) == 0.5


def test_a_horizon_in_which_the_coefficient_could_turn_negative_is_refused() -> None:
    settings = PPOSettings(model="m", reward=("r",), reference=Path("y0"), out=Path("x"))
    kl = KLSettings(target=0.1, horizon=12)
    with pytest.raises(ConfigError, match=r"--kl\.horizon is 12: (.|\n)* more than 12\.8"):
        changed(settings, episodes_per_step=64, kl=kl)
    shortest = changed(settings, episodes_per_step=64, kl=replace(kl, horizon=13)).kl
    assert 0 < adjust(0.1, 0.0, 64, shortest) < 0.002
