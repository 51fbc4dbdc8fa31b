"""Judgments of single responses by flags."""

from rlhf.records.schema import Ranking
from rlhf.records.thumbs import find_thumbs, pointwise_judgments


def ranking(tiers, *flags, annotator="ann") -> Ranking:
    return Ranking(
        id="r", prompt_id="p", annotator=annotator, kind="human",
        tiers=tuple(tuple(tier) for tier in tiers), flags=flags,
    )  # fmt: skip


def judgments(*rankings, down_flags=()):
    found = pointwise_judgments(rankings, down_flags)
    return [(one.ranking.annotator, one.response_id, one.is_good, one.kind) for one in found]


def test_a_thumb_is_about_its_one_response():
    up, down = ranking(["a"], "thumbs-up"), ranking(["b"], "thumbs-down", annotator="bob")
    assert judgments(up, down) == [("ann", "a", True, "thumbs"), ("bob", "b", False, "thumbs")]


def test_all_bad_is_about_every_response_in_the_tiers_ranked_or_not():
    bad = [("ann", one, False, "all_bad") for one in "ab"]
    assert judgments(ranking(["ab"], "all-bad")) == bad  # chosen in place of an order
    assert judgments(ranking(["a", "b"], "all-bad")) == bad  # with an order: the best of a bad lot


def test_a_thumb_replaces_all_bad_of_the_same_annotator_alone():
    rankings = [
        ranking(["ab"], "all-bad"),
        ranking(["a"], "thumbs-up"),
        ranking(["a"], "all-bad", annotator="bob"),
    ]
    assert judgments(*rankings) == [
        ("ann", "a", True, "thumbs"), ("ann", "b", False, "all_bad"), ("bob", "a", False, "all_bad")
    ]  # fmt: skip


def test_flags_of_single_responses_count_where_they_are_named():
    flagged = ranking(["a", "bc"], "thumbs-down@b", "unsafe@c", "unsafe@b", "note", "unsafe")
    assert find_thumbs(flagged) == [("b", False)]
    assert find_thumbs(flagged, ("unsafe",)) == [("b", False), ("c", False)]


def test_other_rankings_judge_no_single_responses():
    assert judgments(ranking(["a", "b"]), ranking(["ab"]), ranking(["x", "a"], "edited")) == []
