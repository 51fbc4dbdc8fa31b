"""The README's figures are those of the committed runs."""

import json
from typing import Any

import pytest

from examples.quickstart.collect import RESULTS, TRIES, minutes, samples, table, tried

README = RESULTS.parent / "README.md"
SEEDS = json.loads(RESULTS.read_text())

each_seed = pytest.mark.parametrize("one", SEEDS, ids=lambda one: one["seed"])


def test_the_readme_shows_the_committed_results() -> None:
    page = README.read_text()
    for shown in (table(SEEDS), samples(SEEDS[0]), minutes(SEEDS)):
        assert shown in page
    assert tried(json.loads(TRIES.read_text())) in page


def test_every_seed_is_there_once() -> None:
    assert [one["seed"] for one in SEEDS] == [0, 1, 2]


@each_seed
def test_three_wins_for_every_loss_within_twelve_nats(one: dict[str, Any]) -> None:
    gold = one["win_rate"]["gold"]
    assert gold["value"] >= 0.75
    assert gold["length_controlled"]["value"] >= 0.7
    assert one["kl"]["reverse"]["nats"] <= 12


@each_seed
def test_answers_still_end(one: dict[str, Any]) -> None:
    assert one["eos_rate"]["policy"] >= one["eos_rate"]["reference"] - 0.05
