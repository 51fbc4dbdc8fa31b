"""Nothing that a line says is dropped: turns, scores, answers, strengths and equal votes."""

import pytest

from labeling_app.data_io.formats import Defaults, read_entry
from labeling_app.db.store import Store
from rlhf.errors import InputError
from tests.labeling_app.data_io.lines import ARGILLA, judged, write


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


@pytest.mark.parametrize("score", ["3", " 4.5", "-1", "1e3"])
def test_a_score_that_is_a_number_as_text_is_refused(score):
    completions = [{"response": "a", "overall_score": 5}, {"response": "b", "overall_score": score}]
    with pytest.raises(InputError, match="overall_score is not a number"):
        read_entry({"instruction": "Hi?", "completions": completions}, Defaults())


@pytest.mark.parametrize("name", ["question", "Instruction", "input"])
@pytest.mark.parametrize("empty", [{}, {"prompt": None}, {"context": ""}])
def test_a_prompt_of_another_name_is_that_of_chosen_and_rejected(name, empty):
    """The two texts begin alike, which without a prompt would be it."""
    texts = {"chosen": "It is 4.", "rejected": "It is 5."}
    entry = read_entry({name: "What is 2+2?", **texts, **empty, "system": "x"}, Defaults())
    assert (entry.prompt.text, judged(entry)) == ("What is 2+2?", [[["It is 4."], ["It is 5."]]])
    assert entry.ignored == ("system",)


def test_chosen_and_rejected_with_an_empty_prompt_or_two_are_refused():
    texts = {"chosen": "It is 4.", "rejected": "It is 5."}
    with pytest.raises(InputError, match="The user turn of a prompt is empty"):
        read_entry({**texts, "question": ""}, Defaults())
    with pytest.raises(InputError, match=r"Which of the fields \['context', 'question'\]"):
        read_entry({**texts, "question": "What?", "context": "Sums."}, Defaults())


def test_turns_that_begin_with_the_assistant_s_come_after_the_prompt():
    prompt = {"role": "user", "content": "Continue"}
    sides = {
        side: [
            {"role": "assistant", "content": "1"},
            prompt,
            {"role": "assistant", "content": last},
        ]
        for side, last in (("chosen", "2"), ("rejected", "3"))
    }
    entry = read_entry({"prompt": [prompt], **sides}, Defaults())
    assert [m.content for m in entry.prompt.messages] == ["Continue", "1", "Continue"]


def test_an_empty_cell_of_thumbs_is_no_thumb(tmp_path, run_json):
    file = tmp_path / "thumbs.csv"
    file.write_text("prompt,response,thumbs\nHi?,yes,up\nHo?,no,\n")
    report = run_json("import", file, "--db", tmp_path / "labels.db")
    assert (report["new_responses"], report["new_rankings"]) == (2, 1)


@pytest.mark.parametrize("options", [[], ["--on-error", "skip"]])
@pytest.mark.parametrize("num_before", [1, 60])  # the first 50 lines are read before a database is
def test_a_file_whose_records_answer_different_questions_is_refused(
    num_before, options, tmp_path, refused
):
    """Of the second record alone nobody could tell that it asks which response is worst."""
    worst = {**ARGILLA, "responses": {"worst": ARGILLA["responses"]["preference"]}}
    unjudged = {**ARGILLA, "responses": {}}
    file, db = tmp_path / "project.jsonl", tmp_path / "labels.db"
    write(file, [*[unjudged] * num_before, ARGILLA, worst])
    shown = refused("import", file, "--db", db, *options)
    location = f"project.jsonl:{num_before + 2}"
    assert f"{location}: 2 questions name the responses: preference, worst" in shown
    if db.exists():
        with Store(db) as store:
            assert set(store.counts().values()) == {0}
