"""The README's figures are those of the committed runs."""

import json
from typing import Any

import pytest

from examples.quickstart.collect import RESULTS, table

README = RESULTS.parent / "README.md"


def test_the_readme_shows_the_committed_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in README.read_text()


def test_every_seed_is_there_once() -> None:
    assert [one["seed"] for one in json.loads(RESULTS.read_text())] == [0, 1, 2]


@pytest.mark.parametrize("one", json.loads(RESULTS.read_text()), ids=lambda one: one["seed"])
def test_three_wins_for_every_loss_within_twelve_nats(one: dict[str, Any]) -> None:
    assert one["win_rate"]["gold"]["value"] >= 0.75
    assert one["kl"]["reverse"]["nats"] <= 12
