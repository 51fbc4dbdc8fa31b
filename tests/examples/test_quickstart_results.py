"""The README's figures are those of the committed runs."""

import json
from pathlib import Path

from examples.quickstart.collect import RESULTS, table

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_the_committed_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in README.read_text()


def test_every_seed_is_there_once() -> None:
    assert [one["seed"] for one in json.loads(RESULTS.read_text())] == [0, 1, 2]
