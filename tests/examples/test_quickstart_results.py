"""The README's figures are those of the committed runs."""

import json
from typing import Any

import pytest

from examples.quickstart.collect import RESULTS, TRIES, commonest, count_ties, samples, table, tried

README = RESULTS.parent / "README.md"
SEEDS = json.loads(RESULTS.read_text())

each_seed = pytest.mark.parametrize("one", SEEDS, ids=lambda one: one["seed"])


def test_the_readme_shows_the_committed_results() -> None:
    page = README.read_text()
    for shown in (table(SEEDS), samples(SEEDS[0]), tried(json.loads(TRIES.read_text()))):
        assert shown in page


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


def test_ties_are_counted_over_all_comparisons_of_a_prompt() -> None:
    scores = {"policy": [0.5, 0.0, 1.0, 1.0], "reference": [0.0, 0.0, 1.0, 0.2]}
    assert count_ties(scores, 2) == 0.5  # second answer twice; then each with the first


def test_the_commonest_words_count_once_an_answer() -> None:
    answers = ["So glad to be here. So glad to be here!", "I am so glad to be!", "Too short."]
    found = commonest(answers)
    assert found == {"words": "so glad to be", "share": pytest.approx(2 / 3)}
