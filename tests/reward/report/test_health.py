import math

import pytest

from reward.data.groups import Group, Pair
from reward.report.health import (
    agreement_levels,
    calibrate,
    collect_verdicts,
    judges_agree,
    length_gap,
    measure_health,
    worst,
)


def group(name, *pairs, prompt=3, lengths=(10, 10, 10)):
    return Group(
        name,
        (1,) * prompt,
        tuple((2,) * length for length in lengths),
        tuple(Pair(f, s, o, strength, who) for f, s, o, strength, who in pairs),
    )


A = group("a", (0, 1, 1.0, 1, "ann"), (0, 1, 1.0, 0, "bob"), (1, 2, 0.5, 0, "ann"), prompt=5)
B = group("b", (0, 1, 1.0, 2, "ann"), (1, 0, 1.0, 3, "bob"), lengths=(20, 10, 10))
VERDICTS = collect_verdicts([A, B], [[1.0, 0.0, 9.0], [0.0, 2.0, 9.0]])


def values(table):
    return {name: (row["value"], row["pairs"], row["prompts"]) for name, row in table.items()}


def test_verdicts_leave_ties_out_and_point_from_winner_to_loser():
    assert [verdict.difference for verdict in VERDICTS] == [1.0, 1.0, -2.0, 2.0]


def test_accuracy_is_cut_in_every_way():
    tables = measure_health(VERDICTS)["accuracy_by"]
    assert values(tables["annotator"]) == {"ann": (0.5, 2, 2), "bob": (1.0, 2, 2)}
    assert values(tables["agreement"]) == {"all agree": (1.0, 2, 1), "judges differ": (0.5, 2, 1)}
    assert values(tables["strength"]) == {
        "1 slight": (1.0, 1, 1),
        "2 clear": (0.0, 1, 1),
        "3 or more, large": (1.0, 1, 1),
        "not given": (1.0, 1, 1),
    }
    assert values(tables["length"]) == {
        "preferred is longer": (0.0, 1, 1),
        "preferred is shorter": (1.0, 1, 1),
        "similar length": (1.0, 2, 1),
    }
    assert values(tables["prompt"]) == {
        "over 4 tokens": (1.0, 2, 1),
        "up to 4 tokens": (0.5, 2, 1),
    }


def test_length_alone_is_measured_as_a_baseline():
    # a: equal lengths, half right twice; b: longer wins once, loses once
    assert measure_health(VERDICTS)["longer_wins"]["value"] == 0.5


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ((100, 80, 1), "similar length"),
        ((100, 79, 1), "preferred is longer"),
        ((79, 100, 1), "preferred is shorter"),
    ],
)
def test_lengths_within_a_fifth_are_similar(lengths, words):
    (verdict,) = collect_verdicts([group("x", (0, 1, 1.0, 0, "ann"), lengths=lengths)], [[0, 0, 0]])
    assert length_gap(verdict) == words


def test_the_ceiling_lies_above_the_agreement_of_two_judges():
    # judges who are right four times in five agree in .8² + .2² = .68 of the comparisons
    pairs = [(0, 1, 1.0, 0, "a"), (0, 1, 1.0, 0, "b")]
    other = [(0, 1, 1.0, 0, "a"), (1, 0, 1.0, 0, "b")]
    groups = [group(str(n), *(pairs if n < 17 else other)) for n in range(25)]
    found = judges_agree(collect_verdicts(groups, [[0.0] * 3] * 25))
    assert found["value"] == pytest.approx(0.68)
    assert found["ceiling"] == pytest.approx(0.8)


def test_judges_agree_on_one_of_two():
    assert judges_agree(VERDICTS) == {"value": 0.5, "n": 2, "ceiling": 0.5}
    alone = collect_verdicts([group("x", (0, 1, 1.0, 0, "ann"))], [[1, 0, 0]])
    assert judges_agree(alone) is None
    assert set(agreement_levels(alone).values()) == {"one judge"}


def test_two_verdicts_under_one_name_are_one_judge_s():
    # nobody was named in the import, and ann says the same as the first of them
    unnamed = [(0, 1, 1.0, 0, "imported"), (1, 0, 1.0, 0, "imported")]
    alone = collect_verdicts([group("x", *unnamed)], [[0.0] * 3])
    assert judges_agree(alone) is None
    assert set(agreement_levels(alone).values()) == {"one judge"}
    with_ann = collect_verdicts([group("x", *unnamed, (0, 1, 1.0, 0, "ann"))], [[0.0] * 3])
    assert judges_agree(with_ann) == {"value": 0.5, "n": 2, "ceiling": 0.5}
    assert set(agreement_levels(with_ann).values()) == {"judges differ"}


def test_calibration_by_hand():
    # four verdicts at σ(ln 3) = 0.75, three right: calibrated; one at σ(ln 19) = 0.95, wrong
    pairs = [(0, 1, 1.0, 0, "ann")] * 5
    differences = [math.log(3)] * 3 + [-math.log(3), -math.log(19)]
    groups = [group(str(n), pair) for n, pair in enumerate(pairs)]
    verdicts = collect_verdicts(groups, [[d, 0.0, 0.0] for d in differences])
    found = calibrate(verdicts)
    assert found["ece"] == pytest.approx(0.95 / 5)
    assert [row["n"] for row in found["bins"]] == [4, 1]
    assert found["bins"][0]["confidence"] == pytest.approx(0.75)
    assert found["bins"][0]["right"] == 0.75


def test_worst_are_the_surest_errors_once_each():
    twice = group("x", (0, 1, 1.0, 0, "ann"), (0, 1, 1.0, 0, "bob"), (2, 1, 1.0, 0, "ann"))
    verdicts = collect_verdicts([twice, A], [[0.0, 3.0, 2.0], [1.0, 0.0, 0.0]])
    assert [v.difference for v in worst(verdicts)] == [-3.0, -1.0]


def test_nothing_to_measure_is_no_error():
    found = measure_health([])
    assert found["longer_wins"] == {}
    assert found["calibration"] == {"ece": None, "bins": []}
