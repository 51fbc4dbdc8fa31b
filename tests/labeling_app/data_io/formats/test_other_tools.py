"""What Argilla and Label Studio exported is imported with its annotators and times."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from labeling_app.data_io import json_arrays
from labeling_app.data_io.formats import Defaults, read_entry
from labeling_app.db.store import Store
from rlhf.cli import main
from rlhf.errors import InputError, MisreadError, UnusableContentError
from rlhf.records.jsonl import BadLineError
from tests.labeling_app.data_io.lines import ARGILLA, BY_U1, TEXTS

FLAT = {
    "id": "7",
    "status": "completed",
    "_server_id": "s",
    "prompt": "Hi?",
    "answer-a": "no",
    "answer-b": "yes",
    "best.responses": ["answer-b", "answer-a"],
    "best.responses.users": ["u1", "u2"],
    "best.responses.status": ["submitted", "draft"],
    "best.suggestion": "answer-a",
}
ANNOTATION = {
    "completed_by": {"id": 3, "email": "ann@example.org"},
    "was_cancelled": False,
    "created_at": "2024-03-09T22:16:08.500000Z",
    "lead_time": 12.5,
}
PAIRWISE = {
    "id": 1,
    "data": {"prompt": "Hi?", "answer1": "no", "answer2": "yes"},
    "annotations": [
        {
            **ANNOTATION,
            "result": [{"type": "pairwise", "value": {"selected": "right"}, "from_name": "pw"}],
        },
        {**ANNOTATION, "completed_by": 4, "was_cancelled": True, "result": []},
    ],
    "predictions": [],
}
ITEMS = [{"id": "m1", "body": "no"}, {"id": "m2", "body": "yes"}, {"id": "m3", "title": "maybe"}]


def ranker(value: object, completed_by: object = 4) -> dict:
    result = [{"type": "ranker", "value": {"ranker": value}, "from_name": "pw"}]
    annotation = {**ANNOTATION, "completed_by": completed_by, "result": result}
    return {"id": 2, "data": {"question": "Hi?", "items": ITEMS}, "annotations": [annotation]}


def ranked(first: object, second: object) -> dict:
    """An answer of Argilla that gives two responses these ranks."""
    ranks = [{"value": "response_1", "rank": first}, {"value": "response_2", "rank": second}]
    return {"value": ranks, **BY_U1}


def judged(value: dict) -> list[tuple[str, list[list[str]]]]:
    """Who ranks which texts how."""
    entry = read_entry(value, Defaults())
    assert [turn.content for turn in entry.prompt.messages] == ["Hi?"]
    texts = {response.id: response.text for response in entry.responses}
    return [(one.annotator, [[texts[i] for i in t] for t in one.tiers]) for one in entry.rankings]


def test_a_ranking_of_argilla_is_read_for_each_user() -> None:
    assert judged(ARGILLA) == [
        ("argilla-u1", [["yes"], ["maybe"], ["no"]]),
        ("argilla-u2", [["no"], ["yes"], ["maybe"]]),
    ]


def test_columns_of_argilla_are_read_and_drafts_are_left_out() -> None:
    assert judged(FLAT) == [("argilla-u1", [["yes"], ["no"]])]


def test_what_was_not_read_of_a_record_is_kept_with_it() -> None:
    said = {"value": ["too long"], **BY_U1}
    flat = {**FLAT, "topic": "t", "why.responses": ["x"], "why.responses.users": ["u1"]}
    flat |= {"why.responses.status": ["submitted"], "metadata.score": 0.5}
    comment = {"type": "textarea", "from_name": "comment", "value": {"text": ["so"]}}
    task = copy.deepcopy(PAIRWISE)
    task["data"]["topic"], task["predictions"] = "t", [{"result": []}]
    task["annotations"][0]["result"].append(comment)
    nested = {**ARGILLA, "metadata": {"a": 1}}
    nested["responses"] = {**ARGILLA["responses"], "why": [said, {**said, "status": "draft"}]}
    entries = [read_entry(one, Defaults()) for one in (flat, nested, task)]
    assert [(one.ignored, one.exported.num_unfinished) for one in entries] == [
        (("topic", "why", "best.suggestion", "metadata.score"), 1),
        (("comment", "why", "suggestions", "metadata"), 1),
        (("topic", "comment", "predictions"), 1),
    ]


def test_two_questions_about_the_responses_are_refused() -> None:
    worst = {"value": "response_1", **BY_U1}
    argilla = {**ARGILLA, "responses": {**ARGILLA["responses"], "worst": [worst]}}
    task = copy.deepcopy(PAIRWISE)
    result = task["annotations"][0]["result"]
    result.append({**result[0], "from_name": "worst", "value": {"selected": "left"}})
    for value, names in ((argilla, "preference, worst"), (task, "pw, worst")):
        with pytest.raises(InputError, match=f"2 questions name the responses: {names}"):
            read_entry(value, Defaults())


@pytest.mark.parametrize("status", ["draft", "discarded"])
def test_a_record_whose_answers_were_not_submitted_is_a_task(status: str) -> None:
    assert judged({**FLAT, "best.responses.status": [status] * 2}) == []
    said = {"preference": [{"value": ["response_1"], "user_id": "u1", "status": status}]}
    assert judged({**ARGILLA, "responses": said}) == []


@pytest.mark.parametrize("value", [["response_1"], ["response_1", "response_3"]])
def test_a_choice_of_several_is_not_an_order(value: list[str]) -> None:
    said = {"acceptable": [{"value": value, **BY_U1}]}
    with pytest.raises(MisreadError, match="names some of the responses, without ranks"):
        read_entry({**ARGILLA, "responses": said}, Defaults())


def test_equal_ranks_of_argilla_tie() -> None:
    ranks = [{"value": "response_1", "rank": 2}, {"value": "response_2", "rank": 1}]
    ranks.append({"value": "response_3", "rank": 2})
    said = {"preference": [{"value": ranks, **BY_U1}]}
    assert judged({**ARGILLA, "responses": said}) == [("argilla-u1", [["yes"], ["no", "maybe"]])]


@pytest.mark.parametrize("ranks", [(2.0, 1.0, 3.0), (2, 1, 3), (1.5, -1, 2)])
def test_ranks_of_argilla_decide_whatever_the_order_they_stand_in(ranks: tuple) -> None:
    named = [{"value": f"response_{n}", "rank": rank} for n, rank in enumerate(ranks, start=1)]
    said = {"preference": [{"value": named, **BY_U1}]}
    expected = [("argilla-u1", [["yes"], ["no"], ["maybe"]])]
    assert judged({**ARGILLA, "responses": said}) == expected


def test_a_record_that_nobody_judged_is_a_task() -> None:
    assert judged({**ARGILLA, "responses": {}}) == []
    assert judged({**PAIRWISE, "annotations": []}) == []


def test_pairs_of_label_studio_are_read_without_skipped_tasks() -> None:
    assert judged(PAIRWISE) == [("ann@example.org", [["yes"], ["no"]])]


@pytest.mark.parametrize("order", [["m2", "m3", "m1"], {"rank": ["m2", "m3", "m1"], "_": []}])
def test_orders_of_label_studio_are_read(order: object) -> None:
    assert judged(ranker(order)) == [("label-studio-4", [["yes"], ["maybe"], ["no"]])]


SIDES = {**PAIRWISE, "data": {"prompt": "Hi?", "text_3": "no", "text_4": "yes"}}
TWO_GROUPS = {"prompt": "Hi?", "a_1": "x", "a_2": "y", "b_1": "x", "b_2": "y"}
TIE = [{"value": "response_2", **BY_U1}, {"value": "tie", **BY_U1, "user_id": "u2"}]
MIN = {"id": 1, "annotator": 2, "annotation_id": 3, "lead_time": 4.5, "pw": "left", **TEXTS}
REFUSED = {
    "JSON-MIN": ({"prompt": "Hi?", **MIN}, "This is Label Studio's JSON-MIN"),
    "buckets": (ranker({"best": ["m1"], "ads": ["m2"]}), r"the buckets \['best', 'ads'\]"),
    "no sides": (SIDES, "says left or right, and the fields are called"),
    "two groups": ({**ARGILLA, "fields": TWO_GROUPS}, "Several groups of fields"),
    "no prompt": ({**ARGILLA, "fields": {"x": "Hi?", "y": "Ho", **TEXTS}}, "is the prompt"),
    "two prompts": ({**ARGILLA, "fields": {"prompt": "a", "query": "b", **TEXTS}}, "is the prompt"),
    "nobody": (
        {**ARGILLA, "responses": {"q": [{**ranked(1, 2), "user_id": None}]}},
        "has no user_id, so two people would be one",
    ),
    "ratings": ({**ARGILLA, "responses": {"q": [{"value": 3, **BY_U1}]}}, "names the resp"),
    "a tie beside a label": ({**ARGILLA, "responses": {"q": TIE}}, "answer of Argilla is 'tie'"),
    "ranks as text": ({**ARGILLA, "responses": {"q": [ranked("2", "1")]}}, r"ranks \['2', '1'\]"),
    "a rank missing": ({**ARGILLA, "responses": {"q": [ranked(2, None)]}}, r"ranks \[2, None\]"),
    "unknown item": (ranker(["m2", "m9"]), r"orders \['m2', 'm9'\], and the responses"),
    "no status": (
        {**ARGILLA, "responses": {"q": [{"value": ["response_1"], "user_id": "u1"}]}},
        r"the status None, so it may be a draft\n  Argilla's to_json leaves the status out",
    ),
    "no column of statuses": (
        {name: value for name, value in FLAT.items() if name != "best.responses.status"},
        "the status None",
    ),
    "no users": ({**FLAT, "best.responses.users": []}, r"2 answers, and best.* has 0\n"),
    "few states": ({**FLAT, "best.responses.status": ["submitted"]}, r"status has 1\n"),
    "no list": ({**FLAT, "best.responses": 5}, "best.responses must be a list, found 5"),
    "neither side": (
        {
            **PAIRWISE,
            "annotations": [{**ANNOTATION, "result": [{"type": "pairwise", "value": {}}]}],
        },
        "selects None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_clear_is_refused(name: str) -> None:
    value, said = REFUSED[name]
    with pytest.raises(InputError, match=said):
        read_entry(value, Defaults())


ODD = [None, 3, 1.5, True, "", "x", [], [1], [[]], [{}], {}, {"a": 1}, {"rank": 3}, 1e300]


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The way to every value inside a record."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inside:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


@pytest.mark.parametrize("record", [ARGILLA, FLAT, PAIRWISE, ranker({"rank": ["m2"], "_": []})])
def test_whatever_a_field_holds_the_record_is_read_or_refused(record: dict) -> None:
    outcomes = set()
    for *above, last in places(record):
        for odd in ODD:
            changed = holder = copy.deepcopy(record)
            for key in above:
                holder = holder[key]
            holder[last] = odd
            try:
                read_entry(changed, Defaults())
            except InputError as error:
                outcomes.add(type(error))
    assert outcomes - {MisreadError} == {InputError, UnusableContentError}


@pytest.mark.parametrize("lead_time", [1e300, -5, 604801, "12", None])
def test_a_time_that_cannot_be_true_is_left_out(lead_time: object) -> None:
    record = {**PAIRWISE, "annotations": [{**PAIRWISE["annotations"][0], "lead_time": lead_time}]}
    [made] = read_entry(record, Defaults()).made.values()
    assert made == {"created_at": 1710022568.5}


def test_a_record_without_two_responses_holds_nothing_to_judge() -> None:
    with pytest.raises(UnusableContentError, match="are two responses"):
        read_entry({**ARGILLA, "fields": {"prompt": "Hi?", "response_1": "yes"}}, Defaults())


def test_an_array_is_imported_with_annotators_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, db = tmp_path / "project.json", tmp_path / "labels.db"
    file.write_text(json.dumps([PAIRWISE, ranker(["m2", "m3", "m1"])], indent=1))
    assert main(["import", str(file), "--db", str(db)]) == 0
    said = capsys.readouterr().out
    assert "Imported 2 rankings of 1 prompt" in said
    assert (
        "Fields that were read: answer1 (1 line), answer2 (1 line), items (1 line), "
        "prompt (1 line), question (1 line). Judgments: pw (2 lines), by ann@example.org (1 "
        "judgment), label-studio-4 (1 judgment). Drafts, discarded and skipped answers left out: 1."
    ) in said
    with Store(db) as store:
        query = "SELECT annotator, created_at, duration_ms FROM rankings ORDER BY seq"
        rows = list(store.connections.db.query(query))
    assert [row["annotator"] for row in rows] == ["ann@example.org", "label-studio-4"]
    # 2024-03-09 22:16:08.5 UTC
    assert [(row["created_at"], row["duration_ms"]) for row in rows] == [(1710022568.5, 12500)] * 2
    assert main(["import", str(file), "--db", str(db)]) == 0
    assert "Nothing new" in capsys.readouterr().out


def read(file: Path) -> list[str]:
    return [text for _, text in json_arrays.read_array(file)]


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_items_are_found_whatever_is_read_at_once(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_arrays, "CHUNK", chunk)
    items = [{"a": "]},{"}, {"b": [1, {"c": "é"}]}, {}]
    file = tmp_path / "items.json"
    for indent in (None, 2):
        file.write_text("\ufeff" * (indent is None) + json.dumps(items, indent=indent) + "\n")
        assert json_arrays.is_array(file)
        assert [json.loads(text) for text in read(file)] == items
    file.write_text(" [ ]")
    assert read(file) == []


BROKEN = {
    '[{"a": 1}': "item 2 is cut off",
    '[{"a": 1': "item 1 is cut off",
    '[{"a": 1} {"b": 2}]': "item 2: a comma is missing",
    '[{"a": 1}, 3]': "item 2 is not an object: '3]'",
    '[{"a": 1}] {"b": 2}': "text after the end",
    f'[{{"a": 1}}] {" " * 2**21} {{"b": 2}}': "text after the end",
    '[{"a": 1},]': "a comma before the end",
    '[{"a": tru}]': "item 1 is cut off or not valid JSON",
    f'[{{"a": {"1" * 5000}}}]': "item 1: an integer of more than 4300 digits",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_array_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "items.json"
    file.write_text(text)
    with pytest.raises(BadLineError, match=BROKEN[text]):
        read(file)


def test_json_lines_in_a_json_file_are_still_lines(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    file.write_text('{"prompt": "Hi?"}\n')
    assert not json_arrays.is_array(file)
