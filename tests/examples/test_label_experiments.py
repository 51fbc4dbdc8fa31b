"""What the experiments on people's labels simulate and count."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from rlhf.errors import InputError
from tests.examples.small_experiments import STORIES, write_pairs

NAMES = ("ethics", "annotators", "priorities")


@pytest.fixture
def modules() -> dict:
    return {name: import_module(f"examples.evidence.human_labels.{name}") for name in NAMES}


@pytest.fixture
def records(modules: dict, tmp_path: Path) -> list:
    ethics = modules["ethics"]
    pairs = ethics.read_pairs(str(write_pairs(tmp_path / "pairs.jsonl.gz")))
    full = [pair for pair in pairs["A"] if not ethics.is_bare(pair)]
    return ethics.as_records(STORIES, full, "train")


def test_held_out_judgments_share_no_prefix_with_the_pool(modules, tmp_path) -> None:
    ethics = modules["ethics"]
    pairs = ethics.read_pairs(str(write_pairs(tmp_path / "pairs.jsonl.gz")))["heldout"]
    drawn = ethics.draw_test({**STORIES, "test": 9}, pairs, pairs[:2])
    asked = {record.prompt.messages[-1].content for record in drawn}
    assert asked == {f"Begin with: I went to heldout house {n}." for n in range(2, 6)}
    assert len(ethics.draw_test({**STORIES, "test": 3}, pairs, [])) == 3


def test_a_dataset_of_the_hub_falls_into_splits_that_share_no_first_sentence(
    modules, tmp_path
) -> None:
    """A folder with the files as the hub converts them; a chain of pairs stays together."""
    pairs = [(f"I met {n}. It was fun.", f"I met {n}. It rained.") for n in range(60)]
    pairs += [(f"We sat  on {n}.", f"We sat on {n + 1}. It hurt.") for n in range(9)]
    columns = {"baseline": [one for one, _ in pairs], "less_pleasant": [one for _, one in pairs]}
    folder = tmp_path / "folder" / "utilitarianism" / "train"
    folder.mkdir(parents=True)
    Dataset.from_dict(columns).to_parquet(folder / "0000.parquet")
    found = modules["ethics"].read_pairs(str(tmp_path / "folder"))
    assert [len(found[split]) > 1 for split in ("A", "B", "heldout")] == [True] * 3
    rows = [{**row, "split": split} for split, rows in found.items() for row in rows]
    assert sorted(row["chosen"] for row in rows) == sorted(
        " ".join(one.split()) for one, _ in pairs
    )
    met, sat = ([row for row in rows if row["chosen"].startswith(one)] for one in ("I", "We"))
    assert {(row["prefix"], row["rejected"]) for row in met} == {
        (f"I met {n}. It", f"I met {n}. It rained.") for n in range(60)
    }
    assert len({row["split"] for row in sat}) == 1
    assert [row["prefix"] for row in sat] == ["We sat on"] * 9


def test_a_dataset_that_is_not_there_is_an_input_error(modules, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"The dataset .*empty cannot be read") as caught:
        modules["ethics"].read_pairs(str(tmp_path / "empty"))
    assert "utilitarianism/train/*.parquet" in caught.value.remedy


def test_simulated_annotators_are_as_right_as_they_should_be(modules, records) -> None:
    annotators = modules["annotators"]
    said = {"honest": 1.0, "other": 1.0, "adversarial": 0.0}
    judged = annotators.simulate(records, said, 2, np.random.default_rng(0))
    for before, after in zip(records, judged, strict=True):
        [real] = before.rankings
        assert len({one.annotator for one in after.rankings}) == 2
        for one in after.rankings:
            is_real = one.tiers == real.tiers
            assert is_real == (one.annotator != "adversarial")
    # six pairs and three groups of two: everybody has four; one right, one wrong are added
    found = annotators.count_right(records, judged)
    assert found == pytest.approx({"honest": 5 / 6, "other": 5 / 6, "adversarial": 1 / 6})


def test_accuracy_above_equal_weights_is_taken_prompt_by_prompt(modules) -> None:
    trust = {"true": {"ann": 0.9}, "estimated": {"ann": 0.8}}
    first = {"right": {"equal": [0.5, 0.0], "true": [1.0, 0.0], "auto": [0.5, 1.0]}, **trust}
    second = {"right": {**first["right"], "auto": [0.5, 0.0]}, **trust, "estimated": {"ann": 1.0}}
    found = modules["annotators"].summarize([first, second])
    assert found["above_equal"]["true"]["value"] == pytest.approx(0.25)  # a half on one of two
    assert found["above_equal"]["auto"]["value"] == pytest.approx(0.25)  # one, in one of two runs
    assert found["of_seeds"]["auto"] == pytest.approx([0.75, 0.25])
    assert found["reliability"]["ann"] == pytest.approx({"true": 0.9, "estimated": 0.9})
    assert found["largest_error"] == pytest.approx(0.1)


def test_labels_needed_lie_on_the_line_between_rounds(modules) -> None:
    needed = modules["priorities"].labels_for
    labels = np.array([200.0, 400.0, 600.0])
    assert needed(0.75, labels, np.array([0.6, 0.7, 0.8])) == pytest.approx(500)
    assert needed(0.5, labels, np.array([0.6, 0.7, 0.8])) == 200
    assert needed(0.9, labels, np.array([0.6, 0.7, 0.8])) == np.inf
    assert needed(0.7, labels, np.array([0.6, 0.8, 0.7])) == pytest.approx(300)


def test_methods_are_compared_with_random_labels(modules) -> None:
    labels = np.array([200, 400, 600])
    slow = np.array([[0.0] * 6, [1.0] * 3 + [0.0] * 3, [1.0] * 6])[None]  # one seed
    quick = np.array([[0.0] * 6, [1.0] * 6, [1.0] * 6])[None]
    random, other = modules["priorities"].compare(labels, {"random": slow, "entropy": quick})
    assert random["accuracy"] == [0.0, 0.5, 1.0]
    assert random["needed"]["value"] == 600
    assert other["needed"] == {"value": 400, "low": 400, "high": 400}
    assert other["above_random"]["value"] == pytest.approx(0.25)  # a half in one of two rounds


def test_a_label_is_what_people_said_whatever_the_order_shown(modules, records, tmp_path) -> None:
    priorities = modules["priorities"]
    best = {record.rankings[0].tiers[0][0] for record in records}
    with priorities.Store(tmp_path / "labels.db") as store:
        store.add_prompts(record.prompt for record in records)
        store.add_responses(one for record in records for one in record.responses)
        queue = priorities.TaskQueue(store)
        queue.add_annotator(priorities.WHO)
        for _ in records:
            priorities.give_label(queue, best)
        said = {r.tiers[0][0] for record in store.ranked_prompts() for r in record.rankings}
        assert said == best
        with pytest.raises(SystemExit, match="no task left"):
            priorities.give_label(queue, best)
