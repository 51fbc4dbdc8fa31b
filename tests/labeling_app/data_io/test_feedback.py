"""`POST /feedback` over HTTP: tokens, thumbs, picks, repetitions, and all that is refused."""

import json

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from labeling_app.annotators.users import Users
from labeling_app.data_io.exporting import export
from labeling_app.data_io.tokens import make_token
from labeling_app.db.imports.unfinished import importing
from labeling_app.web.access.middleware import AuthMiddleware
from labeling_app.web.programs.feedback_route import add_feedback_route
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import Message, Prompt, Ranking, content_id
from tests.labeling_app.conftest import build_responses

THUMB = {"id": "f-1", "prompt": "Hi?", "response": "Hello!", "thumbs": "up"}
PICK = {"id": "f-2", "prompt": "Hi?", "responses": ["Hello!", "Go away."], "pick": 0}


@pytest.fixture
def client(store):
    users = Users(store)
    app = FastAPI()
    add_feedback_route(app, store)
    protected = AuthMiddleware(
        app, find_user=lambda request: None, users=users, secret=store.secret
    )
    with TestClient(protected, base_url="http://board") as opened:
        yield opened


@pytest.fixture
def send(client, store):
    headers = {"authorization": f"Bearer {make_token(store, 'shop')}"}

    def post(payload: object, **more: object):
        content = payload if isinstance(payload, bytes) else json.dumps(payload)
        return client.post("/feedback", content=content, **{"headers": headers, **more})

    return post


def test_a_thumb_becomes_a_label(send, store, tmp_path):
    assert send(THUMB).status_code == 201
    down = {"response": {"text": "Go away.", "model": "m-7"}, "thumbs": "down"}
    chat = [
        {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    assert send({"id": "f-3", "prompt": chat, "note": "rude", **down}).status_code == 201
    export(store, tmp_path / "out", "kto", names=True)
    assert list(read_jsonl(tmp_path / "out" / "train.jsonl")) == [
        {
            "prompt": [{"role": "user", "content": "Hi?"}],
            "completion": [{"role": "assistant", "content": "Hello!"}], "label": True,
        },
        {
            "prompt": chat,
            "completion": [{"role": "assistant", "content": "Go away."}], "label": False,
        },
    ]  # fmt: skip
    [first, second] = store.ranked_prompts()
    assert (first.prompt.source, first.responses[0].model) == ("feedback", "unknown")
    assert second.responses[0].model == "m-7"
    assert (second.rankings[0].annotator, second.rankings[0].note) == ("shop", "rude")


def test_a_pick_becomes_a_pair(send, store, tmp_path):
    assert send(PICK).json() == {"stored": True}
    export(store, tmp_path / "out", "trl")
    [row] = read_jsonl(tmp_path / "out" / "train.jsonl")
    assert (row["chosen"], row["rejected"]) == ("Hello!", "Go away.")
    assert store.counts()["tasks"] == 0  # nobody is asked to rank it again


def test_sending_twice_stores_once(send, store):
    assert [send(THUMB).status_code for _ in range(3)] == [201, 200, 200]
    assert store.counts()["rankings"] == 1


def test_other_feedback_under_a_used_id_is_refused_and_not_dropped(send, store):
    assert send(THUMB).status_code == 201
    for other in ({"thumbs": "down"}, {"response": "Bye!"}, {"prompt": "So?"}, {"note": "odd"}):
        answer = send({**THUMB, **other})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("This id was used before, for something else.")
    assert send(THUMB).status_code == 200
    assert (store.counts()["rankings"], store.counts()["prompts"]) == (1, 1)


def test_feedback_that_an_unfinished_import_holds_too_is_stored_if_the_import_fails(send, store):
    prompt = Prompt.create((Message(role="user", content="Hi?"),), "train", "feedback")
    [response] = build_responses(prompt, ["Hello!"], model="unknown")
    ranking = Ranking(
        id=content_id("feedback", "shop", "f-1"), prompt_id=prompt.id, annotator="shop",
        kind="human", tiers=((response.id,),), flags=("thumbs-up",),
    )  # fmt: skip

    def import_and_fail() -> None:
        with importing(store.connections, "in.jsonl") as current:
            store.add_prompts([prompt], import_id=current.id)
            store.add_responses([response], import_id=current.id)
            store.add_rankings([ranking], import_id=current.id)
            assert [send(THUMB).status_code for _ in range(2)] == [201, 200]
            raise InputError("a bad line", "Fix it.")

    with pytest.raises(InputError, match="a bad line"):
        import_and_fail()
    assert send(THUMB).status_code == 200
    assert store.counts()["rankings"] == 1


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({**THUMB, "id": ""}, "id must be text that is not empty"),
        ({**THUMB, "id": "x" * 65}, "id has 65 characters"),
        ({**THUMB, "prompt": 7}, "prompt must be text"),
        ({**THUMB, "prompt": []}, "prompt must be text"),
        ({**THUMB, "prompt": [{"role": "boss", "content": "x"}]}, "Unknown role 'boss'"),
        ({**THUMB, "prompt": [{"role": "assistant", "content": "x"}]}, "must end with a user turn"),
        ({**THUMB, "response": " "}, "response must be text"),
        ({**THUMB, "response": {"text": "a", "score": 1}}, "response has unknown fields"),
        ({**THUMB, "response": "x" * 100_001}, "response has 100001 characters"),
        ({**THUMB, "thumbs": "sideways"}, "thumbs is 'sideways'. Send up or down"),
        ({**THUMB, "rating": 5}, "Unknown field 'rating'. Send id, prompt, note, response, thumbs"),
        ({**PICK, "pick": 2}, "2 is not a choice among 2 responses"),
        ({"id": "a", "prompt": "Hi?", "responses": ["a", "b"]}, "'nothing' is not a choice"),
        ({**PICK, "responses": ["a"]}, "responses must be a list of 2 to 10"),
        ({**PICK, "responses": ["a", "a"]}, "Two of the responses are the same"),
        ([1], "a JSON list, not an object"),
        (b"{", "not valid JSON"),
        (b'{"id": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"id": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 deep"),
    ],
)
def test_what_is_wrong_is_said(send, store, payload, words):
    answer = send(payload)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert store.counts()["prompts"] == 0


def test_a_body_too_large(send):
    answer = send(b'"' + b"x" * 1_000_000 + b'"')
    assert answer.status_code == 413
    assert answer.json()["error"] == "The body is larger than 1000000 bytes."


def test_wrong_tokens_are_refused_and_then_slowed_down(send, store):
    bad = {"authorization": "Bearer guess"}
    answers = [send(THUMB, headers=bad) for _ in range(11)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429]
    assert answers[0].json()["error"].startswith("This token is not valid.")
    assert "rlhf users token" in answers[0].json()["error"]
    assert answers[10].headers["retry-after"] == "60"
    assert store.counts()["rankings"] == 0
    assert send(THUMB).status_code == 201  # the right one passes all the same
    assert send(THUMB, headers=bad).status_code == 429


def test_right_tokens_do_not_count_and_neither_does_what_a_stranger_says_about_itself(send):
    for _ in range(20):
        assert send(THUMB).status_code in (200, 201)
    bad = [{"authorization": "Bearer guess", "x-forwarded-for": f"10.0.0.{n}"} for n in range(11)]
    statuses = [send(THUMB, headers=headers).status_code for headers in bad]
    assert statuses == [401] * 10 + [429]


def test_a_token_is_for_feedback_alone_and_pages_cannot_send(send, client):
    good = send(THUMB).request.headers["authorization"]
    assert client.get("/dashboard", headers={"authorization": good}).status_code == 401
    page = {"authorization": good, "origin": "https://evil.example"}
    assert send(PICK, headers=page).status_code == 403


def test_tokens_from_the_command_line(store, send, capsys):
    def users(*arguments: str) -> str:
        code = main(["users", *arguments, "--db", str(store.connections.path), "--json"])
        captured = capsys.readouterr()
        return captured.err if code else json.loads(captured.out)

    old = users("token", "app")["token"]
    new = users("token", "app")["token"]
    assert users("list") == {"app": "program", "shop": "program"}
    for token, status in ((old, 401), (new, 201)):
        assert send(PICK, headers={"authorization": f"Bearer {token}"}).status_code == status
    assert users("revoke", "app") == {"program": "app", "revoked": True}
    assert send(PICK, headers={"authorization": f"Bearer {new}"}).status_code == 401
    assert "No program 'app' has a token" in users("revoke", "app")
    Users(store).add("ann", "annotator", "long enough")
    assert "'ann' is a person who signs in" in users("token", "ann")
    assert new not in store.connections.path.read_bytes().decode("latin-1")
