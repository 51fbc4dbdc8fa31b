"""Lines that cannot be used, also by what only the database can tell: named by file and line."""

import pytest

from labeling_app.db.store import Store
from tests.labeling_app.data_io.lines import ASK, BAD, GOOD, PREFERENCES, exported, write

WRONG_TYPES = {
    "response": ({**exported("a"), "responses": ["yes"]}, "response must be a JSON object, found"),
    "strengths null": (exported("a", strengths=None), "needs 'strengths' as list, found None"),
    "strengths 2": (exported("a", strengths=2), "needs 'strengths' as list, found 2"),
    "flags 5": (exported("a", flags=5), "needs 'flags' as list, found 5"),
    "note": (exported("a", note=["x"]), "needs 'note' as str, found ['x']"),
    "tiers": (exported("a", tiers=[[["x"]]]), "must be a list of response ids, found [[['x']]]"),
    "tokens": (exported("a", response={"token_ids": 5}), "needs 'token_ids' as list, found 5"),
    "sampling": (exported("a", response={"sampling": 5}), "needs 'sampling' as dict, found 5"),
    "index": (exported("a", response={"sample_index": "x"}), "needs 'sample_index' as int"),
    "finished": (exported("a", response={"finished": []}), "needs 'finished' as bool, found []"),
    "print": (exported("a", response={"model_fingerprint": []}), "needs 'model_fingerprint' as"),
    "source": (
        {**exported("a"), "prompt": {**exported("a")["prompt"], "source": 5}},
        "needs 'source' as str, found 5",
    ),
}


BAD_LINES = {
    "not JSON": ('{"prompt": ', "not valid JSON"),
    "not an object": ("[1]", "expected a JSON object"),
    "half a character": (r'{"prompt": "cut \ud83d"}', r"\ud83d is half a character"),
    "misspelt prompt": ({"promt": "Hi?"}, "Unknown key 'promt'"),
    "misspelt split": ({"prompt": "Hi?", "splitt": "test"}, "Unknown key 'splitt'"),
    "capital split": ({"prompt": "Hi?", "Split": "test"}, "Unknown key 'Split'"),
    "swapped source": ({"prompt": "Hi?", "soruce": "web"}, "Unknown key 'soruce'"),
    "misspelt responses": ({"prompt": "Hi?", "reponses": ["a"]}, "Unknown key 'reponses'"),
    "no known field": ({"question": "Hi?"}, "No known format has the fields ['question']"),
    "empty prompt": ({"prompt": "  "}, "user turn of a prompt is empty"),
    "prompt of a wrong type": ({"prompt": 3}, "prompt must be text, found 3"),
    "empty response": ({"prompt": "a", "responses": ["b", " "]}, "Response 1 is empty"),
    "ends with an answer": ({"messages": [ASK, *GOOD]}, "must end with a user turn"),
    "position too high": ({"prompt": "a", "responses": ["b"], "tiers": [[1]]}, "name position 1"),
    "position twice": (
        {"prompt": "a", "responses": ["b", "c"], "tiers": [[0], [0, 1]]},
        "a response in two tiers",
    ),
    "a score too few": (
        {"prompt": "a", "responses": ["b", "c"], "scores": [1]},
        "scores must hold a finite number for each of the 2 responses, found [1]",
    ),
    "a score that is none": (
        {"prompt": "a", "responses": ["b", "c"], "scores": [1, None]},
        "scores must hold a finite number for each of the 2 responses, found [1, None]",
    ),
    "scores against the tiers": (
        {"prompt": "a", "responses": ["b", "c"], "tiers": [[0], [1]], "scores": [1, 2]},
        "has score 1 in a tier above score 2",
    ),
    "unknown split": ({"prompt": "a", "split": "dev"}, "Unknown split 'dev'"),
    "unknown kind": ({"prompt": "a", "kind": "robot"}, "Unknown kind of annotator 'robot'"),
    "unknown verdict": (
        {"prompt": "a", "responses": ["b", "c"], "pairs": [[0, 1, "maybe"]]},
        "pairs must hold",
    ),
    "pairs of a wrong type": (
        {"prompt": "a", "responses": ["b", "c"], "pairs": 5},
        "pairs must hold [i, j, first|second|tie], found 5",
    ),
    "a pair of one response": (
        {"prompt": "a", "responses": ["b", "c"], "pairs": [[0, 0, "tie"]]},
        "pairs must hold [i, j, first|second|tie], found [0, 0, 'tie']",
    ),
    "responses of a wrong type": (
        {"prompt": "a", "responses": 5},
        "responses must be a list, found 5",
    ),
    "strengths of a wrong type": (
        {"prompt": "a", "responses": ["b", "c"], "tiers": [[0], [1]], "strengths": 2},
        "strengths must be a list, found 2",
    ),
    "a strength that is a list": (
        {"prompt": "a", "responses": ["b", "c"], "tiers": [[0], [1]], "strengths": [[1]]},
        "has strengths [[1]]",
    ),
    "a score beyond all numbers": (
        {"instruction": "a", "completions": [{"response": "b", "overall_score": 10**400}] * 2},
        "overall_score is not a number",
    ),
    "two conversations": (
        {"chosen": [ASK, *GOOD], "rejected": [{"role": "user", "content": "Oh?"}, *BAD]},
        "do not answer the same conversation",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES | WRONG_TYPES)
def test_a_bad_line_is_named_and_nothing_is_stored(name, tmp_path, refused):
    line, problem = (BAD_LINES | WRONG_TYPES)[name]
    path = write(tmp_path / "in.jsonl", [{"prompt": "fine"}, line])
    message = refused("import", path, "--db", tmp_path / "new.db")
    assert f"{path}:2: " in message
    assert problem in message
    assert "--on-error skip" in message
    assert not (tmp_path / "new.db").exists()


ULTRAFEEDBACK = PREFERENCES["UltraFeedback"]
UNFIT = {
    "annotator of two kinds": (
        {**ULTRAFEEDBACK, "instruction": "b", "annotator": "ann"},
        "'ann' is an annotator of kind human in this database, not ai",
    ),
    "empty response": (exported("b", response={"text": " "}), " is empty"),
    "response to another prompt": (
        exported("b", response={"prompt_id": "p9"}),
        "answers prompt p9, which is not in the database",
    ),
    "ranking of another prompt": (
        exported("b", prompt_id="p9"),
        "names responses its prompt does not have",
    ),
    "ranking of nothing": (exported("b", prompt_id="p9", tiers=[]), "ranks no response"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_only_the_database_can_tell_is_a_bad_line_too(name, tmp_path, refused, run_json):
    line, problem = UNFIT[name]
    person = {"prompt": "a", "chosen": "yes", "rejected": "no", "annotator": "ann"}
    path = write(tmp_path / "in.jsonl", [person, line, {"prompt": "c"}])
    db = tmp_path / "new.db"
    message = refused("import", path, "--db", db)
    assert f"{path}:2: " in message
    assert problem in message
    assert "--on-error skip" in message
    with Store(db) as store:
        assert store.counts()["prompts"] == 0
    report = run_json("import", path, "--db", db, "--on-error", "skip")
    assert (report["lines"], report["bad_lines"], report["new_prompts"]) == (3, 1, 2)
    assert report["new_rankings"] == 1
    assert report["first_bad"][0].startswith(f"{path}:2: ")
    with Store(db) as store:
        assert [prompt.text for prompt in store.prompts()] == ["a", "c"]
        assert store.counts()["responses"] == 2


def test_a_file_without_a_line_that_fits_is_refused_after_those_that_do(tmp_path, refused):
    good = write(tmp_path / "good.jsonl", [{"prompt": "a"}])
    bad = write(tmp_path / "bad.jsonl", [exported("b", response={"text": " "})] * 2)
    db = tmp_path / "new.db"
    files = [str(good), str(bad)]
    said = refused("import", *files, "--db", db, "--on-error", "skip")
    assert f"{bad} holds no good line; nothing of it was imported" in said
    with Store(db) as store:
        assert [prompt.text for prompt in store.prompts()] == ["a"]
