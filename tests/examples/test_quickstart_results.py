"""The README's figures are those of the committed runs."""

import json
from typing import Any

import pytest

from examples.quickstart.collect import (
    RESULTS,
    TRIES,
    count_ties,
    missed,
    samples,
    table,
    tried,
)

README = RESULTS.parent / "README.md"
SEEDS = json.loads(RESULTS.read_text())


def test_the_readme_shows_the_committed_results() -> None:
    page = README.read_text()
    for shown in (table(SEEDS), samples(SEEDS[0]), tried(json.loads(TRIES.read_text()))):
        assert shown in page


def test_every_seed_is_there_once() -> None:
    assert [one["seed"] for one in SEEDS] == [0, 1, 2]


def test_the_readme_names_every_bar_that_is_missed() -> None:
    assert missed(SEEDS) in README.read_text()
    good = {"value": 0.75, "length_controlled": {"value": 0.7}}
    one = {
        "seed": 7,
        "win_rate": {"gold": good},
        "kl": {"reverse": {"nats": 12}},
        "eos_rate": {"reference": 0.8, "policy": 0.8},
    }
    assert missed([one]) == ""
    bad = {"value": 0.7, "length_controlled": {"value": 0.6}}
    far = {"win_rate": {"gold": bad}, "kl": {"reverse": {"nats": 13}}}
    assert missed([{**one, **far, "eos_rate": {"reference": 0.8, "policy": 0.7}}]) == (
        "* Seed 7: wins 70.0 %, under 75 %.\n"
        "* Seed 7: wins 60.0 % at equal length, under 70 %.\n"
        "* Seed 7: moved 13.0 nats, over 12.\n"
        "* Seed 7: the share of responses that end fell by 10 points, over 5."
    )


@pytest.mark.parametrize("one", SEEDS, ids=lambda one: one["seed"])
def test_every_seed_wins_clearly_more_than_half(one: dict[str, Any]) -> None:
    gold = one["win_rate"]["gold"]
    assert min(gold["low"], gold["length_controlled"]["low"]) > 0.6


def test_ties_are_counted_over_all_comparisons_of_a_prompt() -> None:
    scores = {"policy": [0.5, 0.0, 1.0, 1.0], "reference": [0.0, 0.0, 1.0, 0.2]}
    assert count_ties(scores, 2) == 0.5  # second answer twice; then each with the first
