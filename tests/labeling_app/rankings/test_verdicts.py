"""Thumbs, picks and edits as rankings, and the labels that follow from them."""

import pytest

from labeling_app.rankings.verdicts import labels, pick, subject
from rlhf.errors import InputError
from rlhf.records.schema import Ranking


def ranking(tiers, *flags, annotator="ann") -> Ranking:
    return Ranking(
        id="r", prompt_id="p", annotator=annotator, kind="human",
        tiers=tuple(tuple(tier) for tier in tiers), flags=flags,
    )  # fmt: skip


def test_a_pick_puts_one_above_the_rest():
    assert pick(["a", "b", "c"], 1) == ((("b",), ("a", "c")), ())
    assert pick(["a", "b"], "tie") == ((("a", "b"),), ())
    assert pick(["a", "b"], "all-bad") == ((("a", "b"),), ("all-bad",))


@pytest.mark.parametrize("choice", [2, -1, True, "both", None, 0.5])
def test_what_is_no_choice_is_refused(choice):
    with pytest.raises(InputError, match="is not a choice among 2 responses"):
        pick(["a", "b"], choice)


def test_a_later_judgment_of_the_same_kind_is_about_the_same():
    assert subject(ranking(["a", "b"])) == subject(ranking(["ba"], "all-bad"))
    assert subject(ranking(["a"], "thumbs-up")) == subject(ranking(["a"], "thumbs-down"))
    assert subject(ranking(["a"], "thumbs-up")) != subject(ranking(["b"], "thumbs-up"))
    assert subject(ranking(["x", "a"], "edited")) == subject(ranking(["y", "a"], "edited"))
    assert subject(ranking(["x", "a"], "edited")) != subject(ranking(["x", "a"]))


def test_a_thumb_speaks_alone_about_its_response():
    # ann picks a over b and c and dislikes a all the same; bob only ranks
    said = [ranking(["a", "bc"]), ranking(["a"], "thumbs-down"), ranking("ab", annotator="bob")]
    assert sorted(labels(said)) == [
        ("a", False), ("a", True), ("b", False), ("b", False), ("c", False)
    ]  # fmt: skip


def test_an_edit_is_good_and_its_original_is_not_bad():
    assert list(labels([ranking(["x", "a"], "edited")])) == [("x", True)]
    assert list(labels([ranking(["ab"])])) == []
    assert sorted(labels([ranking(["ab"], "all-bad")])) == [("a", False), ("b", False)]


def test_a_response_flagged_as_a_thumb_is_labelled_so_whatever_its_place():
    said = [ranking(["a", "b", "c"], "thumbs-down@a", "thumbs-up@b")]
    assert sorted(labels(said)) == [("a", False), ("b", True), ("c", False)]
