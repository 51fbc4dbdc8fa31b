"""Signals rank, are never people, and do not rank twice."""

import pytest

from labeling_app.annotators.signals import annotate_with_signal
from labeling_app.rankings.tiers import tiers_of_scores
from rlhf.errors import InputError


def length(prompt: str, response: str) -> float:
    return len(response)


def test_tiers_of_scores():
    assert tiers_of_scores([0.2, 0.9, 0.2], 0.0) == [[1], [0, 2]]
    assert tiers_of_scores([0.8, 0.85, 0.9], 0.05) == [[2, 1], [0]]
    assert tiers_of_scores([1.0, 1.0], 0.0) == [[0, 1]]


@pytest.fixture
def answered(store, make_prompt, make_responses):
    prompt = make_prompt("Hi?")
    store.add_prompts([prompt, make_prompt("Unanswered")])
    store.add_responses(make_responses(prompt, ["aaa", "b", "ccc", "dd"]))
    return prompt


def ranked_texts(store) -> list[list[str]]:
    [record] = store.ranked_prompts()
    texts = {response.id: response.text for response in record.responses}
    [ranking] = record.rankings
    return [[texts[i] for i in tier] for tier in ranking.tiers]


def test_a_signal_ranks_with_ties_and_is_no_person(store, answered):
    counts = annotate_with_signal(store, "signal:len", length, 0.0)
    assert counts == {"ranked": 1, "ranked_before": 0, "too_few_responses": 0}
    assert ranked_texts(store) == [["aaa", "ccc"], ["dd"], ["b"]]
    assert store.annotators() == {"signal:len": "signal"}


def test_the_scores_stay_with_the_ranking(store, answered):
    annotate_with_signal(store, "signal:len", length, 1.0)
    assert ranked_texts(store) == [["aaa", "ccc", "dd"], ["b"]]
    [record] = store.ranked_prompts()
    assert record.rankings[0].scores == (3, 3, 2, 1)


def test_running_again_ranks_only_what_changed(store, answered, make_responses):
    annotate_with_signal(store, "signal:len", length, 0.0)
    again = annotate_with_signal(store, "signal:len", length, 0.0)
    assert (again["ranked"], again["ranked_before"]) == (0, 1)
    store.add_responses(make_responses(answered, ["eeeee"], model="another"))
    third = annotate_with_signal(store, "signal:len", length, 0.0)
    assert (third["ranked"], third["ranked_before"]) == (1, 0)
    assert ranked_texts(store) == [["eeeee"], ["aaa", "ccc"], ["dd"], ["b"]]


def test_a_signal_that_returns_no_number_stores_nothing(
    store, answered, tmp_path, monkeypatch, refused
):
    (tmp_path / "odd_rules.py").write_text("def odd(prompt, response):\n    return float('nan')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--db", str(store.connections.path), "--annotator", "signal:odd_rules:odd"]
    said = refused("annotate", *arguments)
    assert "odd_rules:odd returned nan for the response 'aaa' to 'Hi?'" in said
    assert store.counts()["rankings"] == 0


def test_the_command(store, answered, tmp_path, monkeypatch, refused, run_json):
    (tmp_path / "my_rules.py").write_text(
        "def shorter(prompt, response):\n    return -len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["annotate", "--db", str(store.connections.path)]
    result = run_json(*arguments, "--annotator", "signal:my_rules:shorter")
    assert (result["kind"], result["ranked"]) == ("signal", 1)
    assert ranked_texts(store)[0] == ["b"]
    for name, problem in {
        "signal:my_rules:absent": "has no function absent",
        "signal:no_such_module:f": "Cannot import no_such_module",
        "signal:nonsense": "does not name a function",
        "anybody": "--annotator is 'anybody'",
    }.items():
        assert problem in refused(*arguments, "--annotator", name)
    said = refused(*arguments, "--annotator", "signal:a:b", "--tie-within", "-1")
    assert "--tie-within is -1" in said


def test_an_empty_database_names_the_command_that_comes_first(store):
    with pytest.raises(InputError, match=r"holds no responses to rank\n.*rlhf generate"):
        annotate_with_signal(store, "signal:len", length, 0.0)
