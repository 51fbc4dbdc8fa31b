"""Reliability of annotators: EM against hand and oracle, weights, and a training by them."""

import json
from dataclasses import replace
from itertools import cycle
from math import log

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.sparse import csr_array

from reward.data.annotators import estimate_weights
from reward.data.reliability import collect_labels, estimate_reliability, weights_of
from reward.training.train import train_reward
from rlhf.cli import main
from rlhf.commands.models.train_reward import describe_report
from rlhf.errors import InputError
from rlhf.records.fingerprints import file_hash
from rlhf.records.reliability import (
    PairLabel,
    Reliability,
    _find_end,
    _log_posterior,
    find_intervals,
    reliability_of_shared,
    run_em,
)
from tests.reward.conftest import build_record, export
from tests.settings import reward_settings

BASE = 0.9
ACCURACY = {  # two careless ones toss a coin in 40 % of their judgments, eve turns them round
    "ann": BASE,
    "bob": BASE,
    "cat": 0.6 * BASE + 0.4 / 2,
    "dan": 0.6 * BASE + 0.4 / 2,
    "eve": 1 - BASE,
}


def simulate(num_items: int, judges: int, seed: int) -> list[PairLabel]:
    """Labels of as many of the five on every item, and those of zoe, whom nobody can check."""
    random = np.random.default_rng(seed)
    names = list(ACCURACY)
    labels = []
    for number in range(num_items):
        truth = bool(random.integers(2))
        for who in random.choice(names, judges, replace=False):
            is_right = random.random() < ACCURACY[who]
            labels.append(PairLabel((str(number), "x", "y"), str(who), truth == is_right))
        labels.append(PairLabel((str(number), "x", "z"), "zoe", truth))
    return labels


def arrays(labels: list[PairLabel], names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    items = sorted({label.item for label in labels})
    return (
        np.array([items.index(label.item) for label in labels]),
        np.array([names.index(label.annotator) for label in labels]),
        np.array([1.0 if label.first_wins else -1.0 for label in labels]),
    )


def test_two_steps_of_em_by_hand():
    # item 0: a and b say first, c second; item 1: all say first. p = 2/3 and 1, so that a and b
    # have (1 + 5/3) / 4 = 2/3 and c (1 + 4/3) / 4 = 7/12. Then the odds of item 0 are
    # 2 · 2 · 5/7 = 20/7, p = 20/27, and of item 1 they are 2 · 2 · 7/5 = 28/5, p = 28/33.
    item, annotator = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
    sign = np.array([1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    assert run_em(item, annotator, sign, 1) == pytest.approx([2 / 3, 2 / 3, 7 / 12])
    both, last = (1 + 20 / 27 + 28 / 33) / 4, (1 + 7 / 27 + 28 / 33) / 4
    assert run_em(item, annotator, sign, 2) == pytest.approx([both, both, last])


def test_one_shared_pair_says_as_little_where_two_people_differ_as_where_they_agree():
    # With 1 - a in the place of one accuracy, a b + (1 - a)(1 - b) is a (1 - b) + (1 - a) b.
    item = ("prompt", "x", "y")
    agree, differ = (
        reliability_of_shared([PairLabel(item, "ann", True), PairLabel(item, "bob", says)])
        for says in (True, False)
    )
    for name in ("ann", "bob"):
        assert differ[name].value == pytest.approx(0.5)
        ends = (differ[name].low, differ[name].high)
        assert ends == pytest.approx((agree[name].low, agree[name].high), abs=1e-5)


def test_em_ends_where_the_posterior_density_is_highest():
    labels = [label for label in simulate(60, 3, seed=1) if label.annotator != "zoe"]
    item, annotator, sign = arrays(labels, list(ACCURACY))

    def minus_log_posterior(logits: np.ndarray) -> float:
        accuracy = 1 / (1 + np.exp(-logits))
        total = np.log(accuracy * (1 - accuracy)).sum()  # Beta(2, 2)
        for number in range(60):
            mine = item == number
            a = accuracy[annotator[mine]]
            either = [np.prod(np.where(sign[mine] == truth, a, 1 - a)) for truth in (1, -1)]
            total += np.log(sum(either) / 2)
        return -total

    found = run_em(item, annotator, sign)
    start = np.log(found / (1 - found)) + np.array([0.3, -0.3, 0.2, -0.2, 0.1])
    best = minimize(minus_log_posterior, start, method="L-BFGS-B").x
    assert found == pytest.approx(1 / (1 + np.exp(-best)), abs=1e-3)


@pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # of crowd-kit
def test_em_finds_what_crowd_kit_finds():
    from crowdkit.aggregation import OneCoinDawidSkene  # two seconds

    # It has no Beta prior, which moves an estimate from 1,200 labels by about 1 / 1,200, and
    # estimates how often the first response wins: a half, as each item is there in both orders.
    labels = [label for label in simulate(2000, 3, seed=2) if label.annotator != "zoe"]
    rows = [
        (f"{label.item} {order}", label.annotator, label.first_wins == order)
        for label in labels
        for order in (True, False)
    ]
    table = pd.DataFrame(rows, columns=["task", "worker", "label"])
    expected = OneCoinDawidSkene(n_iter=300, tol=0).fit(table).skills_
    found = run_em(*arrays(labels, list(ACCURACY)))
    assert found == pytest.approx([expected[name] for name in ACCURACY], abs=2e-3)


def test_five_annotators_are_recovered_and_the_adversary_is_left_out():
    found = estimate_reliability(simulate(400, 3, seed=0), [*ACCURACY, "zoe"])
    for name, accuracy in ACCURACY.items():
        assert found[name].value == pytest.approx(accuracy, abs=0.07), name
        assert found[name].low < found[name].value < found[name].high
    assert sum(found[name].shared for name in ACCURACY) == 1200
    mean = np.mean([found[name].value for name in ACCURACY])
    assert found["zoe"] == Reliability(pytest.approx(mean), None, None, 0)
    weights = weights_of(found)
    assert weights["eve"] == 0
    assert max(weights.values()) == 1
    assert all(0.2 < weights[name] < 0.7 for name in ("cat", "dan"))
    assert all(weights[name] > 0.8 for name in ("ann", "bob"))


def test_two_annotators_share_what_they_agree_on():
    # a² + (1 − a)² = .82 of equal labels: a = (1 + √(2 · .82 − 1)) / 2 = .9
    labels = [
        PairLabel((str(number), "x", "y"), who, who == "ann" or number < 8200)
        for number in range(10_000)
        for who in ("ann", "bob")
    ]
    found = estimate_reliability(labels, ["ann", "bob"])
    assert [one.value for one in found.values()] == pytest.approx([0.9, 0.9], abs=1e-3)
    # Who of them errs is unknown: (2a − 1)(2b − 1) = .64 also where a is 1 and b is .82.
    for one in found.values():
        assert one.low == pytest.approx(0.82, abs=0.01)
        assert one.high > 0.99


def test_the_log_posterior_is_that_of_two_coins_by_hand():
    # Three items on which they agree, one on which they differ, each likely by ½ · .62 and ½ · .38
    # with .62 = .8 · .7 + .2 · .3 and .38 = .8 · .3 + .2 · .7; the prior is a(1 − a) b(1 − b).
    patterns, counts = csr_array([[1.0, 1.0], [1.0, -1.0]]), np.array([3, 1])
    expected = 3 * log(0.62 / 2) + log(0.38 / 2) + log(0.16 * 0.21)
    found = _log_posterior(patterns, counts, np.array([0.8, 0.7]))
    assert found == pytest.approx(expected)


def test_an_end_is_found_although_two_fits_at_one_place_differ():
    noise = cycle([0.001, 0.001, -0.001])
    found = _find_end(lambda v: 0.6005 - v + next(noise), 0.5, 1.0, 1.0)  # a step ends at 0.6
    assert found == pytest.approx(0.6005, abs=0.003)
    assert _find_end(lambda v: v, 0.5, 0.9, 1.0) == 1


def test_pairs_of_one_prompt_that_always_agree_count_once():
    random = np.random.default_rng(3)
    truth = random.choice([-1.0, 1.0], size=(400, 1))
    labels = truth * np.where(random.random((400, 3)) < [0.8, 0.75, 0.7], 1, -1)

    def intervals(times: int, prompts: np.ndarray) -> np.ndarray:
        signs = labels.repeat(times, axis=0)
        item, annotator = np.nonzero(signs)
        accuracy = run_em(item, annotator, signs[item, annotator])
        return np.array(find_intervals(csr_array(signs), prompts, accuracy))

    once = intervals(1, np.arange(400))
    assert intervals(6, np.arange(400).repeat(6)) == pytest.approx(once, abs=0.02)
    alone = intervals(6, np.arange(2400))
    assert (once[:, 0] > 0.6).all()  # not the 1 − a that explain all labels as well
    assert (np.diff(alone) < 0.6 * np.diff(once)).all()


def test_intervals_of_rankings_contain_the_truth():
    """Three people rank four responses; the third by chance, so the others cannot be told apart."""
    random = np.random.default_rng(0)
    noise = np.array([0.5, 1.0, 1e6])[:, None]  # of the quality that each of them sees
    truth = 0.5 + np.arctan(1 / noise.ravel()) / np.pi  # of a pair of qualities ~ N(0, 1)
    first, second = np.triu_indices(4, 1)
    contained = np.zeros(3)
    for _ in range(25):
        quality = random.normal(size=(40, 1, 4)) + noise * random.normal(size=(40, 3, 4))
        signs = np.sign(quality[..., first] - quality[..., second])  # prompts, people, pairs
        signs = signs.transpose(0, 2, 1).reshape(-1, 3)
        item, annotator = np.nonzero(signs)
        accuracy = run_em(item, annotator, signs[item, annotator])
        found = find_intervals(csr_array(signs), np.arange(40).repeat(6), accuracy)
        contained += [low <= value <= high for (low, high), value in zip(found, truth, strict=True)]
    assert (contained >= 21).all()  # of 25; binomial intervals of right pairs contain 14, 5 and 22


def test_weights_are_log_odds_over_the_largest():
    given = {"a": Reliability(0.9, 0, 1, 5), "b": Reliability(0.75, 0, 1, 5)}
    assert weights_of(given) == {"a": 1.0, "b": pytest.approx(log(3) / log(9))}
    with pytest.raises(InputError, match="no annotator is right more often than a coin"):
        weights_of({"a": Reliability(0.5, 0, 1, 5), "b": Reliability(0.2, 0, 1, 5)})


def test_labels_are_preferences_across_tiers_and_the_last_of_one_annotator_counts():
    record = build_record(1, tiers=((1,), (0, 2)))
    later = replace(record.rankings[0], tiers=tuple(reversed(record.rankings[0].tiers[:2])))
    labels = collect_labels([replace(record, rankings=(record.rankings[0], later))])
    names = [response.id for response in record.responses]
    # 0 and 2 are tied: no label; the second ranking turns both preferences round
    assert labels == [
        PairLabel((record.prompt.id, names[0], names[1]), "ann", True),
        PairLabel((record.prompt.id, names[1], names[2]), "ann", False),
    ]


# ---- a training ----


def judged(number: int, split: str = "train") -> object:
    """ann and bob like the sun, eve the rain; ann and zoe alone judge some prompts."""
    record = build_record(number, split, tiers=((0, 1), (2, 3)))
    [given] = record.rankings
    said = {"ann": given.tiers, "bob": given.tiers, "eve": given.tiers[::-1]}
    if number % 6 == 1:
        said = {"zoe": given.tiers}
    rankings = (
        replace(given, id=f"{given.id}-{who}", annotator=who, tiers=tiers)
        for who, tiers in said.items()
    )
    return replace(record, rankings=tuple(rankings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    records = [judged(n, "test" if n % 4 == 0 else "train") for n in range(24)]
    return export(tmp_path_factory.mktemp("rankings"), records)


def test_a_training_uses_the_weights_that_it_reports(folder, tiny_model, tmp_path, capsys):
    out = tmp_path / "auto"
    words = ["train-reward", "--rankings", str(folder), "--model", str(tiny_model)]
    words += ["--out", str(out), "--precision", "fp32", "--batch.prompts", "4"]
    assert main([*words, "--annotator-weights", "auto"]) == 0
    text = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())["annotators"]
    # of 14 shared train prompts each, with 4 preferences
    assert [report[name]["reliability"]["shared"] for name in report] == [56, 56, 56, 0]
    values = [report[name]["reliability"]["value"] for name in report]
    assert values[:3] == pytest.approx([57 / 58, 57 / 58, 1 / 58], abs=1e-3)
    assert values[3] == pytest.approx(sum(values[:3]) / 3)
    weights = {name: row["weight"] for name, row in report.items()}
    assert weights["ann"] == weights["bob"] == 1
    assert weights["eve"] == 0 < weights["zoe"] < 1
    assert (
        "Not proven better than chance: eve (right in 2 % of 56 shared judgments, weight 0)."
        in text
    )
    assert "Nobody else judged the same responses as zoe" in text
    page = (out / "report.html").read_text()
    assert "Not proven better than chance: eve" in page
    assert "<td>66 % (the mean)</td><td>0</td>" in page
    settings = reward_settings(
        rankings=folder, model=str(tiny_model), out=tmp_path / "numbers", precision="fp32",
        prompts_per_batch=4, annotator_weights=weights,
    )  # fmt: skip
    by_hand = train_reward(settings)
    files = [tmp_path / name / "model/model.safetensors" for name in ("auto", "numbers")]
    assert file_hash(files[0]) == file_hash(files[1])
    assert {name: row["share"] for name, row in report.items()} == {
        name: row["share"] for name, row in by_hand["annotators"].items()
    }
    text = describe_report(settings, json.loads((settings.out / "report.json").read_text()))
    assert "Not proven" not in text


def test_who_judged_only_test_prompts_gets_no_weight():
    test = judged(1, "test")  # by zoe alone
    found = estimate_weights([*(judged(n) for n in (2, 3, 4)), test])
    assert set(found.weights) == set(found.reliability) == {"ann", "bob", "eve"}


def test_without_shared_judgments_there_is_nothing_to_estimate_from(rankings, tiny_model, tmp_path):
    settings = reward_settings(
        rankings=rankings, model=str(tiny_model), out=tmp_path / "out", precision="fp32",
        annotator_weights="auto",
    )  # fmt: skip
    with pytest.raises(InputError, match="no two of them judged the same two responses"):
        train_reward(settings)
    assert not settings.out.exists()
