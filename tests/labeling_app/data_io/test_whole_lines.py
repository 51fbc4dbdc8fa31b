"""Nothing that a line says is dropped: turns, scores, answers, strengths and equal votes."""

import pytest

from labeling_app.data_io.formats import Defaults, read_entry
from labeling_app.db.store import Store
from rlhf.errors import InputError
from tests.labeling_app.data_io.lines import judged, write


def turns(*contents):
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("prompt", "before", "kept"),
    [
        (turns("a"), turns("-", "b", "c")[1:], "abc"),  # goes on after the prompt
        (turns("a", "b", "c"), turns("a", "b", "c"), "abc"),  # repeats it
        ([SYSTEM], turns("a"), "Sa"),
        ([SYSTEM, *turns("a")], turns("a"), "Sa"),  # repeats its end
        (turns("a"), [SYSTEM, *turns("a")], "Sa"),
        ([], turns("a"), "a"),
        (turns("a"), [SYSTEM, *turns("a", "b", "c")], "Sabc"),  # in the middle
        ([SYSTEM, *turns("a")], turns("a", "b", "c"), "Sabc"),  # an end that is repeated
    ],
)
def test_a_prompt_and_the_turns_of_both_sides_are_one_conversation(prompt, before, kept):
    sides = {
        name: [*before, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")
    }
    entry = read_entry({"prompt": prompt, **sides}, Defaults())
    assert "".join(message.content for message in entry.prompt.messages) == kept
    assert judged(entry) == [[["chosen"], ["rejected"]]]


def test_completions_without_a_score_do_not_cost_the_others_theirs():
    value = {
        "instruction": "Hi?",
        "completions": [
            {"model": str(score), "response": str(score), "overall_score": score}
            for score in (None, 3, "N/A", 5)
        ],
    }
    entry = read_entry(value, Defaults())
    assert judged(entry) == [[["5"], ["3"]]]
    assert entry.rankings[0].scores == (5, 3)


@pytest.mark.parametrize(
    ("margin", "strengths"),
    [(2.0, (2,)), ("3", (3,)), (0.0, ()), (0.37, ()), (9, ()), (True, ()), (None, ())],
)
def test_a_margin_of_trl_is_the_strength_that_it_was_exported_from(margin, strengths):
    value = {"prompt": "Hi?", "chosen": "yes", "rejected": "no", "margin": margin}
    assert read_entry(value, Defaults()).rankings[0].strengths == strengths


@pytest.mark.parametrize("name", ["response", "completion"])
def test_one_answer_without_a_judgment_is_kept(name):
    entry = read_entry({"prompt": "Hi?", name: "yes"}, Defaults())
    assert [response.text for response in entry.responses] == ["yes"]
    assert entry.rankings == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [("response", "responses"), ("completion", "responses"), ("completion", "response")],
)
def test_two_places_for_the_answer_are_refused(first, second):
    rest = {"responses": ["no"]} if second == "responses" else {second: "no"}
    for label in ({}, {"label": True} if first == "completion" else {}):
        with pytest.raises(InputError, match=f"both {first} and {second}"):
            read_entry({"prompt": "Hi?", first: "yes", **rest, **label}, Defaults())


@pytest.mark.parametrize("name", ["response", "completion"])
def test_an_empty_cell_is_no_answer(name):
    assert read_entry({"prompt": "Hi?", name: ""}, Defaults()).responses == ()


def test_columns_of_other_formats_do_not_matter():
    more = {"response": "r", "responses": ["p"], "completion": [{"role": "user", "content": "c"}]}
    preference = {"prompt": "Hi?", "chosen": "yes", "rejected": "no"}
    assert judged(read_entry({**preference, **more}, Defaults())) == [[["yes"], ["no"]]]


def test_votes_of_people_without_names_all_count(tmp_path, run_json):
    one = {"prompt": "Hi?", "responses": ["A", "B"]}
    votes = [{**one, "tiers": tiers} for tiers in [[[0], [1]]] * 3 + [[[1], [0]]] * 2]
    named = [{**vote, "annotator": "ann"} for vote in votes[:2]]  # who said it twice
    thumbs = [{"prompt": "Hi?", "response": "A", "thumbs": "up"}] * 2
    path = write(tmp_path / "votes.jsonl", [*votes, *named, *thumbs])
    db = tmp_path / "new.db"
    assert run_json("import", path, "--db", db)["new_rankings"] == 5 + 1 + 2
    assert run_json("import", path, "--db", db)["new_rankings"] == 0
    with Store(db) as store:
        [record] = store.ranked_prompts()
    texts = {response.id: response.text for response in record.responses}
    first = [texts[ranking.tiers[0][0]] for ranking in record.rankings]
    assert sorted(first) == ["A"] * 6 + ["B"] * 2
