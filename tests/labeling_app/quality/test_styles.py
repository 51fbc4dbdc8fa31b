"""Length, lists, hedging and refusals: what counts as one, and how often it wins."""

from math import log2

import pytest

from labeling_app.db.queue import Submission
from labeling_app.quality.styles import MIN_PROMPTS, PROPERTIES, properties_of, what_wins
from tests.labeling_app.conftest import quality_page

LONGER, LIST, HEDGES, REFUSES = range(4)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Two things:\n\n- a\n- b", {LIST}),
        ("1. First\n2) Second", {LIST}),
        ("One dash - and another - is no list.\n- one item", set()),
        ("2024. It was good.", set()),
        ("Perhaps it is; I think so.", {HEDGES}),
        ("The mighty river.", set()),
        ("I'm sorry, but I can't help with that.", {REFUSES}),
        ("I\u2019m unable to share this.", {REFUSES}),
        ("I am sorry to hear that your dog died.", set()),
        ("As an AI, I have no opinion. Maybe ask a friend.", {HEDGES, REFUSES}),
        ("x" * 200 + " I cannot help with that.", set()),
    ],
)
def test_what_counts(text: str, found: set[int]) -> None:
    length, *others = properties_of(text)
    assert length == log2(len(text))
    assert {number for number, value in enumerate(others, start=1) if value} == found


def test_one_property_alone_wins_as_often_as_it_was_preferred() -> None:
    properties = {"plain": (5.0, 0.0, 0.0, 0.0), "list": (5.0, 1.0, 0.0, 0.0)}
    better, worse, tie = [["list"], ["plain"]], [["plain"], ["list"]], [["plain", "list"]]
    judged = [(f"p{n}", worse if n % 4 == 0 else better) for n in range(MIN_PROMPTS)]
    effects = what_wins([*judged, ("p0", tie)], properties)
    assert [effect.name for effect in effects] == list(PROPERTIES)
    assert [effect.num_pairs for effect in effects] == [0, MIN_PROMPTS, 0, 0]
    value, low, high = effects[LIST].chance
    assert value == pytest.approx(0.75)
    # β = log 3; each prompt is a pair: V = 20/19 · (15/16 + 5 · 9/16) / (20 · 3/16)² = 0.2807
    assert (low, high) == pytest.approx((0.5150, 0.8944), abs=1e-4)
    few = what_wins(judged[1:], properties)
    assert few[LIST].chance is None


def test_length_is_in_doublings_and_other_properties_are_held_fixed() -> None:
    # The longer one wins 3 of 4 at equal lists; lists always come with length and add nothing.
    properties = {
        "short": (4.0, 0.0, 0.0, 0.0),
        "long": (6.0, 0.0, 0.0, 0.0),
        "long list": (6.0, 1.0, 0.0, 0.0),
    }
    judged = []
    for number in range(40):
        for other in ("long", "long list"):
            order = [[other], ["short"]] if number % 4 else [["short"], [other]]
            judged.append((f"p{number}", order))
    effects = what_wins(judged, properties)
    # σ(2 β) = 3/4 for two doublings
    assert effects[LONGER].chance[0] == pytest.approx(3**0.5 / (1 + 3**0.5))
    assert effects[LIST].chance[0] == pytest.approx(0.5)


def test_a_property_that_always_wins_is_left_out_and_the_others_are_estimated() -> None:
    properties = {
        "short": (4.0, 0.0, 0.0, 0.0),
        "long": (5.0, 0.0, 0.0, 0.0),
        "list": (4.0, 1.0, 0.0, 0.0),
    }
    judged = []
    for number in range(40):
        order = [["long"], ["short"]] if number % 4 else [["short"], ["long"]]
        judged += [(f"p{number}", order), (f"p{number}", [["list"], ["short"]])]
    effects = what_wins(judged, properties)
    assert effects[LONGER].chance[0] == pytest.approx(0.75)
    assert (effects[LIST].chance, effects[LIST].num_pairs) == (None, 40)


def test_the_page_says_what_people_reward(store, queue, make_prompt, make_responses) -> None:
    for number in range(MIN_PROMPTS):
        prompt = make_prompt(f"prompt {number}")
        store.add_prompts([prompt])
        store.add_responses(make_responses(prompt, ["Perhaps it is", "Yes it is"]))
    queue.add_annotator("ann")
    for number in range(MIN_PROMPTS):
        task = queue.next_task("ann")
        hedging = next(n for n, text in enumerate(task.texts) if text.startswith("Perhaps"))
        best = hedging if number % 2 else 1 - hedging
        queue.submit(
            "ann", Submission(id=str(number), task_id=task.id, tiers=((best,), (1 - best,)))
        )
    text = quality_page(store)
    row = text.partition('<tr><th scope="row">hedges</th>')[2].partition("</tr>")[0]
    assert row == "<td>–</td><td>20</td>"  # the longer one is always the one that hedges
    assert "What people reward" in text
