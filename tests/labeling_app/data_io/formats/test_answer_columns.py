"""Answers in columns of their own, and which one is preferred: none is lost unsaid."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labeling_app.data_io.formats import Defaults, Entry, read_entry
from labeling_app.db.store import Store
from rlhf.errors import InputError, UnusableContentError
from tests.labeling_app.data_io.lines import judged, write

HEADERS = {
    "answer_a and preferred": ("prompt", "answer_a", "answer_b", "preferred"),
    "response_a and winner": ("prompt", "response_a", "response_b", "winner"),
    "response_1 and preference": ("prompt", "response_1", "response_2", "preference"),
    "a and winner": ("prompt", "a", "b", "winner"),
    "capitals and spaces": ("Prompt", "Answer A", "Answer B", "Preferred answer"),
    "answer-a and choice": ("question", "answer-a", "answer-b", "choice"),
    "completion1 and label": ("instruction", "completion1", "completion2", "label"),
    "output_left and best": ("text", "output_left", "output_right", "best"),
}
ENDS = {"response_1": "12", "completion1": "12", "output_left": ("left", "right")}


def named(header: str) -> tuple[str, str]:
    """How a judgment calls the two answers."""
    first, second = ENDS.get(HEADERS[header][1], "ab")
    return first, second


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("container", ["csv", "jsonl", "parquet"])
def test_answers_and_judgments_of_a_spreadsheet_are_imported(header, container, tmp_path, run_json):
    columns, (first, second) = HEADERS[header], named(header)
    rows = [
        ("Q1", "yes", "no", first),
        ("Q2", "no", "yes", second.upper()),
        ("Q3", "no", "yes", columns[2]),
        ("Q4", "so", "so so", "tie"),
        ("Q5", "so", "so so", "Equal"),
        ("Q6", "so", "so so", "both"),
        ("Q7", "yes", "no", ""),
    ]
    path = tmp_path / f"in.{container}"
    lines = [dict(zip(columns, row, strict=True)) for row in rows]
    if container == "csv":
        with path.open("w", newline="") as stream:
            csv.writer(stream).writerows([columns, *rows])
    elif container == "jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        pq.write_table(pa.Table.from_pylist(lines), path)
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["new_prompts"], report["new_responses"], report["new_rankings"]) == (7, 14, 6)
    assert report["ignored_fields"] == {}
    with Store(tmp_path / "new.db") as store:
        said = {
            one.prompt.text: judged(
                Entry(prompt=one.prompt, responses=one.responses, rankings=one.rankings)
            )
            for one in store.ranked_prompts()
        }
    won, tied = [[["yes"], ["no"]]], [[["so", "so so"]]]
    assert said == {"Q1": won, "Q2": won, "Q3": won, "Q4": tied, "Q5": tied, "Q6": tied, "Q7": []}


THREE = {"prompt": "Hi?", "response_1": "one", "response_2": "two", "response_10": "ten"}
A_OR_B = {"prompt": "Hi?", "answer_a": "one", "answer_b": "two"}


@pytest.mark.parametrize(
    ("preferred", "tiers"),
    [
        (10, [["ten"], ["one", "two"]]),
        ("2.0", [["two"], ["one", "ten"]]),  # as a spreadsheet writes a number
        ("C", [["ten"], ["one", "two"]]),  # the third
        (" Response 1 ", [["one"], ["two", "ten"]]),
        ("tie", [["one", "two", "ten"]]),
    ],
)
def test_of_several_answers_the_best_is_above_the_others(preferred, tiers):
    assert judged(read_entry({**THREE, "winner": preferred}, Defaults())) == [tiers]


def test_an_empty_answer_is_left_out_and_a_judgment_needs_two():
    two = read_entry({**THREE, "response_2": " ", "winner": "10"}, Defaults())
    assert judged(two) == [[["ten"], ["one"]]]
    alone = read_entry({**A_OR_B, "answer_b": "", "preferred": ""}, Defaults())
    assert ([one.text for one in alone.responses], alone.rankings) == (["one"], ())
    none = read_entry({**A_OR_B, "answer_a": None, "answer_b": None}, Defaults())
    assert (none.prompt.text, none.responses) == ("Hi?", ())
    with pytest.raises(UnusableContentError, match="preferred is 'a', and answer_b is empty"):
        read_entry({**A_OR_B, "answer_b": "", "preferred": "a"}, Defaults())


def test_a_line_with_answers_has_what_our_own_lines_have():
    line = {**A_OR_B, "preferred": "b", "annotator": "ann", "split": "test", "topic": "en"}
    entry = read_entry({**line, "source": "sheet"}, Defaults())
    [ranking] = entry.rankings
    assert (ranking.annotator, entry.prompt.split, entry.prompt.source) == ("ann", "test", "sheet")
    assert entry.ignored == ("topic",)


def test_of_two_names_for_prompts_the_one_in_lower_case_is_meant():
    entry = read_entry({**A_OR_B, "Context": "x"}, Defaults())
    assert (entry.prompt.text, entry.ignored) == ("Hi?", ("Context",))


def test_only_letters_from_a_on_without_a_gap_are_answers():
    numbered = {"no": "1", "prompt": "Hi?", "a": "one", "b": "two", "best": "b"}
    entry = read_entry(numbered, Defaults())
    assert judged(entry) == [[["two"], ["one"]]]
    assert entry.ignored == ("no",)
    for names in (("de", "hi"), ("n", "k"), ("b", "c")):
        entry = read_entry({"prompt": "Hi?", **dict.fromkeys(names, "x")}, Defaults())
        assert (entry.responses, set(entry.ignored)) == ((), set(names))


@pytest.mark.parametrize("said", ["0", "-1", "3", " -2.0 "])
def test_a_number_of_no_answer_stops_an_import_that_leaves_out_bad_lines(said, tmp_path, refused):
    path = tmp_path / "in.csv"
    rows = [f"Q{n},yes,no,{label}" for n, label in enumerate(["1", "2", said])]
    path.write_text("\n".join(["prompt,answer_1,answer_2,label", *rows]))
    message = refused("import", path, "--db", tmp_path / "new.db", "--on-error", "skip")
    assert f"{path}:4: label is {said!r}, and the answers are numbered 1, 2" in message
    assert "If label counts from 0, add 1 to every number of the file" in message
    assert "Nothing of the file was stored." in message
    assert "--on-error skip" not in message
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("container", ["csv", "jsonl"])
def test_an_empty_prompt_is_not_replaced_by_another_field(container, tmp_path, refused):
    rows = [("Wozu?", "Physik"), ("", "Physik")]
    names = ("Frage", "Thema", "answer_a", "answer_b")
    lines = [dict(zip(names, (*row, "x", "y"), strict=True)) for row in rows]
    path = tmp_path / f"in.{container}"
    if container == "csv":
        path.write_text("\n".join(map(",".join, [names, *((*row, "x", "y") for row in rows)])))
    else:
        path.write_text("\n".join(map(json.dumps, lines)))
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert "Which of the fields ['Frage', 'Thema'] is the prompt?" in said
    with pytest.raises(InputError, match=r"Which of the fields \[\] is the prompt"):
        read_entry({"ID": "17", "answer_a": "x", "answer_b": "y"}, Defaults())


UNKNOWN = {
    "an answer that is a number": ({**A_OR_B, "answer_b": 6}, "answer_b must be text, found 6"),
    "names for texts": ({**A_OR_B, "chosen": "a", "rejected": "b"}, "which name answers of ans"),
    "whole names for texts": (
        {**A_OR_B, "chosen": "answer_b", "rejected": "Answer A"},
        "which name answers of answer_a, answer_b",
    ),
    "names of models for texts": (
        {"prompt": "Hi?", "model_x": "yes", "model_y": "no", "chosen": "model_y"}
        | {"rejected": "model_x"},
        "which name answers of model_x, model_y",
    ),
    "one column for each judgment": (
        {**A_OR_B, "winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0},
        "winner_model_a, winner_model_b, winner_tie look like answers or judgments",
    ),
    "a score of each answer": ({**A_OR_B, "score_a": 5, "rating_b": 2}, "score_a, rating_b look"),
    "the number of the best": ({**A_OR_B, "preferred_id": 1}, "preferred_id looks like"),
    "a wins": ({**A_OR_B, "a_wins": "1"}, "a_wins looks like"),
    "the worst": ({**A_OR_B, "worst": "a"}, "worst looks like"),
    "an order": ({**A_OR_B, "ranking": "b>a"}, "ranking looks like"),
    "other capitals": ({"prompt": "Hi?", "Chosen": "x", "Rejected": "y"}, "Unknown key 'Chosen'"),
    "a word": ({**A_OR_B, "preferred": "maybe"}, "preferred is 'maybe', which names none of the"),
    # 0 and 1, or 1 and 2: a guess would turn judgments around
    "a number for a letter": ({**A_OR_B, "label": 1}, "label is 1, which names none of the"),
    "an answer that is empty": ({**THREE, "response_2": "", "winner": 2}, "winner is 2, which"),
    "both of three": ({**THREE, "winner": "both"}, "Write 1, 2, 10, one of these names, tie or"),
    "two judgments": ({**A_OR_B, "winner": "a", "label": "b"}, "Both winner and label could say"),
    "two groups": ({**A_OR_B, "output_1": "x", "output_2": "y"}, "Several groups of fields"),
    "two prompts": ({**A_OR_B, "context": "x"}, r"Which of the fields .*'context', 'prompt'\]"),
    "no prompt": ({"answer_a": "x", "answer_b": "y", "split": "test"}, r"the fields \[\] is the"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_names_leave_open_is_refused(name):
    line, said = UNKNOWN[name]
    with pytest.raises(InputError, match=said):
        read_entry(line, Defaults())


LOST = {
    "winner": {"prompt": "Hi?", "gpt": "yes", "claude": "no", "winner": "gpt"},
    "boss_preferred": {**A_OR_B, "boss_preferred": "b"},
    "Winner (boss)": {**A_OR_B, "preferred": "a", "Winner (boss)": "tie"},
    "answer": {"prompt": "Hi?", "answer": "yes"},
    "answer_text": {**A_OR_B, "answer_text": "three", "preferred": "a"},
    "response_b": {"prompt": "Hi?", "response": "yes", "response_b": "no"},
    "preferred": {"prompt": "Hi?", "responses": ["yes", "no"], "preferred": "yes"},
    "label": {"prompt": "Hi?", "responses": ["yes", "no"], "label": 1},
    "chosen": {"prompt": "Hi?", "chosen": "yes"},
    "rejected": {"prompt": "Hi?", "rejected": "no"},
    "Output": {"messages": [{"role": "user", "content": "Hi?"}], "Output": ["yes", "no"]},
}


@pytest.mark.parametrize("name", LOST)
def test_an_answer_or_judgment_that_would_be_lost_is_refused(name, tmp_path, refused):
    path = write(tmp_path / "in.jsonl", [{"prompt": "fine"}, LOST[name]])
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert f"{path}:2: {name} looks like an answer or a judgment, and would not be read" in said
    assert "Answers are read from answer_a, answer_b, …" in said
    assert not (tmp_path / "new.db").exists()


def test_all_that_would_be_lost_is_named(tmp_path, refused):
    path = tmp_path / "in.csv"
    path.write_text("prompt,answer,answer_text,winner\nHi?,yes,yes indeed,long\n")
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert "answer, answer_text, winner look like answers or judgments, and would not" in said


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "Hi?", "chosen": "yes", "rejected": "no", "response_1": "x", "preference": 3},
        {"prompt": "Hi?", "responses": ["yes", "no"], "tiers": [[0], [1]], "output": "x"},
        {"prompt": "Hi?", "response": "yes", "completion_tokens": 7, "winner": None},
        {"prompt": "Hi?", "completion": "yes", "label": True},
        {"prompt": "Hi?", "chosen": "yes", "rejected": "no", "response_1": 3, "response_2": 5},
        {"prompt": "Hi?", "chosen": "x", "rejected": "y", "a": "x", "b": "y", "output_1": "x"},
        {"prompt": "Hi?", "response": "yes", "response_id": "r1", "response_time_ms": "900"},
        {"prompt": "Hi?", "response": "yes", "output_tokens": "7", "response_format": "json"},
        {"prompt": "Hi?", "preferred_language": "de", "label": "spam"},
        {**A_OR_B, "preferred": "a", "preferred_language": "de", "best_before": 2027},
        {"prompt": "Hi?", "a": "yes"},
        {"prompt": "Hi?", "a": 1, "b": 2},
    ],
)
def test_fields_beside_what_was_read_are_no_loss(line: dict):
    assert read_entry(line, Defaults()).prompt.text == "Hi?"


def test_the_path_of_a_file_is_what_a_bad_line_names(tmp_path: Path, refused):
    path = tmp_path / "in.csv"
    path.write_text("prompt,answer_a,answer_b,preferred\nQ1,yes,no,a\nQ2,yes,no,left\n")
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert (
        f"{path}:3: preferred is 'left', which names none of the answers answer_a, answer_b" in said
    )
    assert "Write a, b, one of these names, tie or equal or both, or nothing" in said
