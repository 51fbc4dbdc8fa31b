"""Every format becomes prompts, responses and rankings; a bad line is named, nothing stored."""

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from labeling_app.data_io.fields import ignored_in_words
from labeling_app.data_io.formats import Defaults, read_entry
from labeling_app.data_io.importing import Report
from labeling_app.db.store import Store
from labeling_app.rankings.tiers import judgments_of_pairs
from rlhf.cli import main
from rlhf.errors import InputError, UnusableContentError
from rlhf.records.schema import RankedPrompt
from tests.labeling_app.data_io.lines import ARGILLA, ASK, GOOD, PREFERENCES, TEXTS, judged, write

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.mark.parametrize("name", PREFERENCES)
def test_yes_beats_no_in_every_format(name):
    entry = read_entry(PREFERENCES[name], Defaults())
    [[[better], [worse]]] = judged(entry)
    assert (entry.prompt.text, better.strip(), worse.strip()) == ("Hi?", "yes", "no")


def test_hh_keeps_the_conversation():
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    entry = read_entry({"chosen": start + "d", "rejected": start + "e"}, Defaults())
    assert [(m.role, m.content) for m in entry.prompt.messages] == [
        ("user", "a"), ("assistant", "b"), ("user", "c")
    ]  # fmt: skip
    assert judged(entry) == [[["d"], ["e"]]]


def test_ultrafeedback_is_the_work_of_a_model_and_equal_scores_tie():
    value = {
        "instruction": "Hi?",
        "completions": [
            {"model": name, "response": name, "overall_score": score}
            for name, score in (("a", 3), ("b", 5), ("c", 3))
        ],
    }
    entry = read_entry(value, Defaults())
    assert judged(entry) == [[["b"], ["a", "c"]]]
    assert entry.rankings[0].scores == (5, 3, 3)
    assert (entry.rankings[0].kind, entry.rankings[0].annotator) == ("ai", "imported-ai")
    assert [response.model for response in entry.responses] == ["a", "b", "c"]


def test_a_score_that_is_not_a_number_is_refused():
    completions = [
        {"response": "a", "overall_score": float("nan")},
        {"response": "b", "overall_score": 2},
    ]
    with pytest.raises(InputError, match=r"overall_score is not a number: \[nan, 2\]"):
        read_entry({"instruction": "Hi?", "completions": completions}, Defaults())


def test_own_lines_carry_everything():
    value = {
        "messages": [{"role": "system", "content": "Be brief."}, ASK],
        "split": "test", "source": "travel", "annotator": "ann", "kind": "human",
        "responses": [{"text": "yes", "model": "m"}, "no", "maybe"],
        "tiers": [[0], [2, 1]], "strengths": [3],
    }  # fmt: skip
    entry = read_entry(value, Defaults())
    assert (entry.prompt.split, entry.prompt.source) == ("test", "travel")
    assert entry.prompt.messages[0].role == "system"
    assert [response.model for response in entry.responses] == ["m", "imported", "imported"]
    assert judged(entry) == [[["yes"], ["maybe", "no"]]]
    assert (entry.rankings[0].strengths, entry.rankings[0].annotator) == ((3,), "ann")


def test_scores_stand_by_the_responses_of_a_line_and_follow_its_tiers():
    value = {"prompt": "Hi?", "responses": ["a", "b", "c", "d"], "scores": [1, 4, 2, 3]}
    [alone] = read_entry(value, Defaults()).rankings
    assert alone.scores == (4, 3, 2, 1)
    tied = read_entry({**value, "tiers": [[3, 1], [0]]}, Defaults())
    assert judged(tied) == [[["d", "b"], ["a"]]]
    assert tied.rankings[0].scores == (3, 4, 1)
    pairs = read_entry({**value, "pairs": [[0, 1, "second"], [2, 3, "tie"]]}, Defaults())
    assert [ranking.scores for ranking in pairs.rankings] == [(4, 1), (2, 3)]


def test_equal_scores_tie():
    value = {"prompt": "Hi?", "responses": ["a", "b", "c"], "scores": [1, 2, 1]}
    assert judged(read_entry(value, Defaults())) == [[["b"], ["a", "c"]]]


def test_pairs_that_fit_an_order_become_that_order():
    pairs = [[0, 1, "second"], [0, 2, "tie"], [1, 2, "first"]]
    assert judgments_of_pairs(pairs, 3) == [[[1], [0, 2]]]


@pytest.mark.parametrize(
    "pairs",
    [
        [[0, 1, "first"], [1, 2, "first"], [0, 2, "second"]],  # a circle
        [[0, 1, "tie"], [1, 2, "tie"], [0, 2, "first"]],  # ties that do not carry over
        [[0, 1, "first"], [1, 2, "first"]],  # 0 against 2 was never asked
    ],
)
def test_other_pairs_stay_what_was_said(pairs):
    rankings = judgments_of_pairs(pairs, 3)
    said = {"first": lambda i, j: [[i], [j]], "second": lambda i, j: [[j], [i]]}
    said["tie"] = lambda i, j: [[i, j]]
    assert rankings == [said[verdict](i, j) for i, j, verdict in pairs]


def test_a_pair_asked_in_both_orders_is_one_pair():
    # 1 against 2 was never asked, so no order says what was said.
    both = [[0, 1, "first"], [1, 0, "second"], [0, 2, "first"]]
    assert judgments_of_pairs(both, 3) == [[[0], [1]], [[0], [2]]]
    assert judgments_of_pairs([[2, 1, "second"], *both], 3) == [[[0], [1], [2]]]
    assert judgments_of_pairs([[1, 0, "tie"], [0, 1, "tie"]], 2) == [[[0, 1]]]


@pytest.mark.parametrize("again", [[1, 0, "first"], [0, 1, "second"]])
def test_two_answers_to_one_pair_make_no_order(again):
    pairs = [[0, 1, "first"], [1, 2, "first"], [0, 2, "first"], again]
    expected = [[[0], [1]], [[1], [2]], [[0], [2]], [[1], [0]]]
    assert judgments_of_pairs(pairs, 3) == expected


def test_equal_texts_stay_two_responses():
    value = {"prompt": "Hi?", "responses": ["same", "same"], "tiers": [[1, 0]]}
    entry = read_entry(value, Defaults())
    assert len({response.id for response in entry.responses}) == 2
    assert judged(entry) == [[["same", "same"]]]


SAME = {"prompt": "Hi?", "responses": ["same", "other", "same"]}
EQUAL = {
    "tiers": {**SAME, "tiers": [[0], [1], [2]]},
    "scores": {**SAME, "scores": [1, 2, 3]},
    "pairs": {**SAME, "pairs": [[0, 2, "first"]]},
    "chosen": {"prompt": "Hi?", "chosen": "same", "rejected": "same"},
    "columns": {"prompt": "Hi?", "a": "same", "b": "same", "winner": "a"},
    "Argilla": {**ARGILLA, "fields": {"prompt": "Hi?", **dict.fromkeys(TEXTS, "same")}},
}


@pytest.mark.parametrize("name", EQUAL)
def test_nobody_can_prefer_one_of_two_equal_texts(name):
    with pytest.raises(UnusableContentError, match="Two responses have the same text 'same', and"):
        read_entry(EQUAL[name], Defaults())


def test_few_lines_that_prefer_one_of_equal_texts_are_left_out_and_counted(tmp_path, run_json):
    same = {"prompt": "x", "chosen": "same", "rejected": "same"}
    good = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(100)]
    path = write(tmp_path / "in.jsonl", [same, *good])
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["bad_lines"], report["new_rankings"]) == (1, 100)


def test_an_exported_line_comes_back_as_it_was():
    first = read_entry(PREFERENCES["own, best second"], Defaults(source="s"))
    record = RankedPrompt(prompt=first.prompt, responses=first.responses, rankings=first.rankings)
    again = read_entry(json.loads(json.dumps(record.to_json())), Defaults())
    assert (again.prompt, again.responses, again.rankings) == (
        first.prompt, first.responses, first.rankings
    )  # fmt: skip


def test_a_misspelt_key_is_refused_and_a_column_in_the_singular_is_not():
    with pytest.raises(InputError, match="Unknown key 'splitt'\n  Did you mean 'split'"):
        read_entry({"prompt": "Hi?", "splitt": "test"}, Defaults())
    columns = {"prompt": "Hi?", "model": "m", "score": 3, "prompt_id": "p", "a": 1}
    assert read_entry(columns, Defaults()).prompt.text == "Hi?"


def test_fields_that_are_not_read_are_named_once_with_their_lines(tmp_path, run_json, capsys):
    lines = [
        {"prompt": "A?", "promt": "x", "responses": ["a", "b"], "topic": "en"},
        {"prompt": "B?", "chosen": "x", "rejected": "y", "score_chosen": 3, "margin": 2.0},
        {"prompt": "C?", "completion": "c", "label": True, "topic": None},  # null: not there
        {"instruction": "D?", "completions": [{"response": "d", "extra": 1}], "topic": "de"},
    ]
    path, db = write(tmp_path / "in.jsonl", lines), tmp_path / "new.db"
    assert main(["import", str(path), str(path), "--db", str(db)]) == 0
    said = "Fields that were not read: topic (4 lines), promt (2 lines), score_chosen (2 lines)."
    assert said in capsys.readouterr().out.splitlines()
    assert run_json("import", path, "--db", db)["ignored_fields"] == {
        "promt": 1, "topic": 2, "score_chosen": 1
    }  # fmt: skip


def test_messages_beside_a_preference_are_not_read():
    ours = [{"role": "user", "content": "Another question?"}]
    line = {"prompt": "Hi?", "messages": ours, "chosen": "yes", "rejected": "no"}
    entry = read_entry(line, Defaults())
    assert (entry.prompt.text, entry.ignored) == ("Hi?", ("messages",))


def test_few_of_many_names_are_said():
    report = Report()
    for number in range(300):
        report.count("ignored_fields", {f"field-{number:03}": 1})
    assert len(report.ignored_fields) == 200
    said = ignored_in_words(report.ignored_fields)
    assert said.startswith("Fields that were not read: field-000 (1 line), ")
    assert said.endswith("field-007 (1 line) and 192 more.")
    assert ignored_in_words({}) == ""


def test_the_name_of_a_field_cannot_control_a_terminal():
    said = "Fields that were not read: ?[2Jlang? (1 line)."
    assert ignored_in_words({"\x1b[2Jlang\n": 1}) == said


def test_skipping_counts_bad_lines_and_shows_the_first(tmp_path, run_json):
    bad = [{"prompt": ""}] * 7
    path = write(tmp_path / "in.jsonl", [{"prompt": "a"}, *bad, {"prompt": "b"}])
    db = tmp_path / "new.db"
    report = run_json("import", path, "--db", db, "--on-error", "skip")
    assert (report["lines"], report["new_prompts"], report["bad_lines"]) == (9, 2, 7)
    assert len(report["first_bad"]) == report["bad_lines"] == 7
    assert report["first_bad"][0].startswith(f"{path}:2: ")


def test_importing_twice_changes_nothing(tmp_path, run_json):
    path = write(tmp_path / "in.jsonl", list(PREFERENCES.values()))
    db = tmp_path / "new.db"
    first = run_json("import", path, "--db", db)
    second = run_json("import", path, "--db", db)
    assert first["new_prompts"] == 1  # all ten formats say "Hi?"
    assert (second["new_prompts"], second["new_responses"], second["new_rankings"]) == (0, 0, 0)
    assert second["in_db"] == first["in_db"]


def test_split_and_source_of_lines_that_do_not_say_it(tmp_path, run_json):
    path = write(tmp_path / "travel.jsonl", [{"prompt": "a"}, {"prompt": "b", "split": "train"}])
    run_json("import", path, "--db", tmp_path / "new.db", "--split", "test")
    with Store(tmp_path / "new.db") as store:
        found = [(p.text, p.split, p.source) for p in store.prompts()]
    assert found == [("a", "test", "travel"), ("b", "train", "travel")]


@pytest.mark.parametrize("container", ["jsonl.gz", "parquet", "csv", "folder", "splits"])
def test_containers(container, tmp_path, run_json):
    rows = [{"prompt": f"p{i}", "chosen": "yes", "rejected": "no"} for i in range(3)]
    path = tmp_path / f"in.{container}"
    dataset = Dataset.from_list(rows)
    if container == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    elif container == "parquet":
        dataset.to_parquet(path)
    elif container == "csv":
        dataset.to_csv(path)
    elif container == "folder":
        dataset.save_to_disk(path)
    else:
        DatasetDict(train=dataset.select([0, 1]), test=dataset.select([2])).save_to_disk(path)
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["new_prompts"], report["new_responses"], report["new_rankings"]) == (3, 6, 3)
    with Store(tmp_path / "new.db") as store:
        expected = ["train", "train", "test" if container == "splits" else "train"]
        assert [p.split for p in store.prompts()] == expected


def test_wrong_files_are_refused(tmp_path, refused):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "bad.parquet").write_text("no parquet")
    expected = {
        "missing.jsonl": "No such file",
        "missing.parquet": "No such file",
        "folder": "not one that datasets' save_to_disk wrote",
        "empty.jsonl": "holds no line",
        "latin.jsonl": "is not UTF-8",
        "bad.parquet": "cannot be read as parquet",
    }
    for name, problem in expected.items():
        assert problem in refused("import", tmp_path / name, "--db", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


def test_one_name_cannot_be_a_person_and_a_machine(tmp_path, refused):
    path = write(tmp_path / "in.jsonl", list(PREFERENCES.values()))
    db = str(tmp_path / "new.db")
    said = refused("import", path, "--db", db, "--annotator", "ann")
    assert "'ann' is an annotator of kind human" in said
    with Store(tmp_path / "new.db") as store:
        assert store.counts()["prompts"] == 0


def test_unknown_kind_setting():
    with pytest.raises(InputError, match="Use human, ai or signal"):
        read_entry({"prompt": "a", "kind": "dog"}, Defaults())


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
def test_real_human_pairs_over_four_responses(tmp_path, run_json):
    """400 prompts; where the six judgments fit no order, each stays a ranking of two."""
    path = SHARED / "qa_feedback_human_k4.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["new_prompts"], report["new_responses"]) == (400, 1600)
    by_text = {line["prompt"]: line for line in lines}
    with Store(tmp_path / "new.db") as store:
        for record in store.ranked_prompts():
            line = by_text[record.prompt.text]
            place = {response.id: response.sample_index for response in record.responses}
            said = {
                tuple(sorted(place[i] for tier in r.tiers for i in tier)) for r in record.rankings
            }
            whole = said == {(0, 1, 2, 3)}
            assert whole or len(record.rankings) == 6
            for first, second, verdict in line["pairs"]:
                assert verdict in implied(record.rankings, place, first, second)


def implied(rankings, place, first, second) -> set[str]:
    found = set()
    for ranking in rankings:
        rank = {place[i]: level for level, tier in enumerate(ranking.tiers) for i in tier}
        if first in rank and second in rank:
            order = rank[first] - rank[second]
            found.add("tie" if order == 0 else "first" if order < 0 else "second")
    assert len(found) == 1
    return found


THUMBS = {
    "own": ({"prompt": "Hi?", "response": "yes", "thumbs": "up"}, "thumbs-up"),
    "own with a model": (
        {"messages": [ASK], "response": {"text": "yes", "model": "m"}, "thumbs": "down"},
        "thumbs-down",
    ),
    "trl": ({"prompt": "Hi?", "completion": "yes", "label": True}, "thumbs-up"),
    "trl conversational": ({"prompt": [ASK], "completion": GOOD, "label": False}, "thumbs-down"),
}


@pytest.mark.parametrize("name", THUMBS)
def test_thumbs_are_rankings_of_one_response_with_a_flag(name):
    value, flag = THUMBS[name]
    entry = read_entry(value, Defaults())
    assert (entry.prompt.text, [one.text for one in entry.responses]) == ("Hi?", ["yes"])
    [thumb] = entry.rankings
    assert thumb.tiers == ((entry.responses[0].id,),)
    assert (thumb.flags, thumb.annotator, thumb.kind) == ((flag,), "imported", "human")


def test_columns_without_a_thumb_say_nothing():
    value = {"prompt": "Hi?", "responses": ["yes"], "thumbs": None, "response": None}
    for more in ({"completion": None, "label": True}, {"completion": "", "label": None}):
        assert read_entry(value | more, Defaults()).rankings == ()


def test_thumbs_stand_beside_the_ranking_of_a_line():
    value = {"prompt": "Hi?", "responses": ["yes", "no"], "tiers": [[0], [1]], "annotator": "ann"}
    entry = read_entry({**value, "thumbs": [None, "down"]}, Defaults())
    order, thumb = entry.rankings
    assert order == read_entry(value, Defaults()).rankings[0]
    assert (thumb.tiers, thumb.annotator) == (((entry.responses[1].id,),), "ann")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thumbs": "sideways"}, "thumbs is 'sideways'"),
        ({"thumbs": ["up", "up"]}, r"2 thumbs for 1 response\b"),
        ({"thumbs": {}}, r"thumbs is \{\}"),
        ({"completion": "yes", "label": 1}, "label is 1"),
        ({"completion": [ASK], "label": True}, "one assistant message"),
        ({"thumbs": "up", "response": ""}, "Response 0 is empty"),
    ],
)
def test_thumbs_that_say_nothing_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        read_entry({"prompt": "Hi?", "response": "yes", **changes}, Defaults())


def test_thumbs_go_through_the_database_into_the_ranked_export(tmp_path, run_json):
    lines = [value for value, _ in THUMBS.values()]
    file, db = write(tmp_path / "thumbs.jsonl", lines), tmp_path / "labels.db"
    for new in (4, 0):  # "own" and "trl" say the same of the same response, for two people
        assert run_json("import", file, "--db", db)["new_rankings"] == new
    assert main(["export", "--db", str(db), "--out", str(tmp_path / "out"), "--names"]) == 0
    [line] = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    record = RankedPrompt.from_json(json.loads(line))
    flags = [(ranking.annotator, *ranking.flags) for ranking in record.rankings]
    assert sorted(flags) == [
        *[("imported", "thumbs-down")] * 2, *[("imported", "thumbs-up")] * 2
    ]  # fmt: skip
