"""The preview of an upload: what is in the file, and what is wrong with it, before it is stored."""

import json

import anyio
import httpx
import pytest

from labeling_app.web.lead import data
from tests.labeling_app.data_io.lines import ARGILLA, TEXTS
from tests.labeling_app.web.lead.files import GOOD, HOSTILE, importing, jsonl, upload


def test_a_file_is_previewed_and_then_imported(ask, store):
    shown, state = ask(importing("mine.jsonl", jsonl(GOOD), split="test", annotator="ann"))
    assert shown["rows"] == [
        {
            "line": "1",
            "prompt": HOSTILE,
            "responses": ["good", "bad"],
            "rankings": ["A > B"],
            "split": "test",
            "source": "mine",
        }
    ]
    assert (shown["lines"], shown["bad_lines"], shown["is_whole"]) == (1, 0, True)
    assert state["say"] == "Imported mine.jsonl: 1 prompt, 2 responses, 1 ranking."
    [record] = store.ranked_prompts()
    assert (record.prompt.source, record.rankings[0].annotator) == ("mine", "ann")


def test_answers_and_judgments_in_columns_are_shown_before_they_are_stored(ask, store):
    content = b"prompt,answer_a,answer_b,preferred\nQ1,one,two,b\nQ2,one,two,tie\nQ3,one,two,\n"
    shown, state = ask(importing("sheet.csv", content))
    assert [(row["prompt"], row["responses"], row["rankings"]) for row in shown["rows"]] == [
        ("Q1", ["one", "two"], ["B > A"]),
        ("Q2", ["one", "two"], ["A = B"]),
        ("Q3", ["one", "two"], []),
    ]
    assert shown["ignored"] == ""
    assert state["say"] == "Imported sheet.csv: 3 prompts, 6 responses, 2 rankings."
    assert store.counts()["rankings"] == 2


def test_a_judgment_that_would_be_lost_is_said_and_nothing_is_stored(ask, store):
    shown, state = ask(importing("sheet.csv", b"prompt,gpt,claude,winner\nQ1,one,two,gpt\n"))
    assert "winner looks like an answer or a judgment, and would not be read" in shown["error"]
    assert "winner looks like an answer or a judgment, and would not be read" in state["error"]
    assert store.counts()["prompts"] == 0


def test_fields_that_are_not_read_are_said_before_and_after_the_import(ask):
    shown, state = ask(importing("mine.jsonl", jsonl({**GOOD, "promt": HOSTILE, "topic": "en"})))
    said = "Fields that were not read: promt (1 line), topic (1 line)."
    assert shown["ignored"] == said
    assert state["say"] == f"Imported mine.jsonl: 1 prompt, 2 responses, 1 ranking. {said}"


def test_a_preview_is_short(ask):
    lines = [{"prompt": "x" * 400, "responses": ["y" * 400, f"{n}"]} for n in range(6)]
    shown, _ = ask(importing("mine.jsonl", jsonl(*lines)))
    assert (shown["lines"], len(shown["rows"])) == (6, 5)
    assert shown["rows"][0]["prompt"] == "x" * 300
    assert shown["rows"][0]["responses"] == ["y" * 300, "0"]


def test_a_preview_that_takes_too_long_ends(ask, monkeypatch):
    async def endless(job: dict) -> dict:
        return await anyio.sleep_forever()

    monkeypatch.setattr(data, "MAX_PREVIEW_SECONDS", 0.01)
    monkeypatch.setattr(data, "run_job", endless)

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        chosen = {"id": await upload(client, "mine.jsonl", jsonl(GOOD))}
        return [await client.post("/lead/data/preview", json=chosen)]

    [answer] = ask(run)
    assert answer.json()["error"] == (
        "Reading mine.jsonl takes more than 0.01 s. Import it on the server: rlhf import FILE "
        "--db DB"
    )


def test_a_preview_stores_nothing(ask, store):
    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        chosen = {"id": await upload(client, "mine.jsonl", jsonl(GOOD))}
        return [await client.post("/lead/data/preview", json=chosen)]

    [answer] = ask(run)
    assert answer.status_code == 200
    assert store.counts()["prompts"] == 0


def test_bad_lines_are_listed_and_left_out_only_if_asked(ask, store):
    content = jsonl(GOOD, {"prompt": 3}, {"prompt": "Hi?"})
    shown, state = ask(importing("mine.jsonl", content))
    assert shown["bad_lines"] == 1
    assert shown["first_bad"][0].startswith("mine.jsonl:2: ")
    assert state["error"].startswith("mine.jsonl:2: ")
    assert state["error"].endswith("To leave out bad lines, choose that, and import.")
    assert store.counts()["prompts"] == 0


SPLITS = [
    (["train", "train", "test", "test"], "1 train prompt and 2 test prompts."),
    (["train", "train"], "1 train prompt and no test prompts."),
    (["test"], "No train prompts and 1 test prompt."),
]


@pytest.mark.parametrize(("splits", "said"), SPLITS)
def test_how_many_prompts_are_for_training_and_for_testing_is_said(splits, said, ask):
    prompts = {"train": ["a", "a"], "test": ["b", "c"]}  # two lines about one prompt
    lines = [{"prompt": prompts[split].pop(), "split": split} for split in splits]
    gold = {**GOOD, "purpose": "gold"}  # is for neither
    shown, _ = ask(importing("mine.jsonl", jsonl(*lines, gold)))
    assert shown["splits"] == said


def test_where_a_split_is_chosen_the_page_says_what_it_is_for(ask):
    [page] = ask([("GET", "/lead/data", None)])
    assert "Models learn from <em>train</em> prompts." in page.text
    assert "test prompts at its end come last." in page.text


def test_a_misspelled_key_is_said_with_the_one_that_is_meant(ask):
    typo = {"prompt": "Hi?", "responses": ["a", "b"], "tires": [[0], [1]]}
    shown, state = ask(importing("mine.jsonl", jsonl(GOOD, typo, typo, {"promt": "Hi?"})))
    assert shown["first_bad"] == [
        "mine.jsonl:2: Unknown key 'tires'. Did you mean 'tiers'? Rename it.",
        "mine.jsonl:3: Unknown key 'tires'",
        "mine.jsonl:4: Unknown key 'promt'. Did you mean 'prompt'? Rename it.",
    ]
    assert "Did you mean 'tiers'? Rename it." in state["error"]


def test_what_was_read_of_an_export_of_argilla_is_said_before_and_after_the_import(ask):
    draft = {"value": ["response_2"], "user_id": "u3", "status": "draft"}
    answers = {**ARGILLA["responses"], "best": [draft]}
    other = {**ARGILLA, "fields": {**TEXTS, "prompt": "And?", "topic": "c"}, "responses": answers}
    shown, state = ask(importing("project.json", json.dumps([ARGILLA, other]).encode()))
    # two records, each ranked by two users, with a comment and suggestions
    read = (
        "Fields that were read: prompt (2 lines), response_1 (2 lines), response_2 (2 lines), "
        "response_3 (2 lines). Judgments: preference (2 lines), by argilla-u1 (2 judgments), "
        "argilla-u2 (2 judgments). Drafts, discarded and skipped answers left out: 1."
    )
    ignored = "Fields that were not read: comment (2 lines), suggestions (2 lines), topic (1 line)."
    assert (shown["read"], shown["ignored"]) == (read, ignored)
    assert state["say"].endswith(f"6 responses, 4 rankings. {read} {ignored}")
