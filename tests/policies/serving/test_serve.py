"""`rlhf serve --policy` before small model servers, asked by the openai client."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from labeling_app.db.answers.served import find_served
from labeling_app.db.store import Store
from tests.servers.chat import ChatServer
from tests.servers.commands import free_port
from tests.servers.served_policy import PolicyServer, served_policy
from tests.servers.waiting import wait_until

HI = [{"role": "user", "content": "Hi?"}]


@pytest.fixture(scope="module")
def upstream() -> Iterator[ChatServer]:
    with ChatServer() as server:
        server.models = ["new"]
        yield server


@pytest.fixture(scope="module")
def original() -> Iterator[ChatServer]:
    with ChatServer() as server:
        server.answers = ["the original says so"]
        yield server


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "labels.db"


@pytest.fixture(scope="module")
def server(upstream: ChatServer, original: ChatServer, db: Path) -> Iterator[PolicyServer]:
    with served_policy(
        *("--endpoint", upstream.url, "--against", "old", "--against-endpoint", original.url),
        *("--db", db, "--keep.redact", "tests.policies.serving.redaction:without_digits"),
    ) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _as_before(upstream: ChatServer, original: ChatServer) -> None:
    for one in (upstream, original):
        one.failures, one.streams, one.ending = [], True, "stop"
        one.gate.set()


@pytest.fixture
def store(server: PolicyServer, db: Path) -> Iterator[Store]:
    with Store(db) as opened:
        yield opened


def kept(store: Store, served_id: str) -> tuple[str, str]:
    """Question and answer of what was kept."""
    found = find_served(store.connections.db, served_id)
    assert found is not None
    return found.prompt.text, found.response.text


def test_a_streamed_answer_arrives_whole_and_is_kept_under_its_id(server, upstream, store):
    asked = {"model": "policy", "messages": HI, "temperature": 0.5, "max_tokens": 9}
    events = list(server.openai.chat.completions.create(**asked, stream=True))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    [served_id] = {event.id for event in events}
    assert {event.model for event in events} == {"policy"}
    assert events[-1].choices[0].finish_reason == "stop"
    assert kept(store, served_id) == ("Hi?", text)
    found = find_served(store.connections.db, served_id)
    assert found.response.finished
    assert found.response.sampling is None  # the server may cut off what the request does not say


def test_an_answer_at_once_is_kept_too_and_neither_names_the_model(
    server, upstream, original, store
):
    upstream.streams = original.streams = False
    upstream.ending = original.ending = "length"
    found = server.openai.chat.completions.create(model="policy", messages=HI)
    assert found.model == "policy"
    assert kept(store, found.id) == ("Hi?", found.choices[0].message.content)
    assert find_served(store.connections.db, found.id).response.finished is False
    assert [one.id for one in server.openai.models.list()] == ["policy"]


def test_both_policies_answer_under_their_own_names_at_their_servers(server, upstream, original):
    for one in (upstream, original):
        one.streams = False
        one.calls.clear()
    for _ in range(24):  # all on one side: 1 in 8 million
        server.ask()
    assert {call["model"] for call in upstream.calls} == {"new"}
    assert {call["model"] for call in original.calls} == {"old"}
    assert {call["path"] for call in upstream.calls} == {"/v1/chat/completions"}


def test_a_conversation_stays_with_the_policy_that_began_it(server, upstream, original):
    upstream.streams = original.streams = False
    for _ in range(4):
        messages, before = list(HI), (len(upstream.calls), len(original.calls))
        for _ in range(4):
            body = {"model": "policy", "messages": messages}
            said = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
            again = {"role": "user", "content": "And?"}
            messages = [*messages, {"role": "assistant", "content": f" {said['content']} "}, again]
        new, old = len(upstream.calls) - before[0], len(original.calls) - before[1]
        assert {new, old} == {0, 4}


def test_one_line_in_an_app_is_feedback(server, upstream, original, store):
    upstream.streams = original.streams = False
    before, counted = server.get("/comparison").json(), server.metrics()
    first, second, third = server.ask(), server.ask(), server.ask("Why?")
    thumb = {"id": first["id"], "thumbs": "up", "note": "call 555"}
    assert server.post("/feedback", thumb).json() == {"stored": True}
    assert [server.post("/feedback", thumb).status_code for _ in range(2)] == [200, 200]
    pick = {"ids": [first["id"], second["id"]], "pick": 1}
    assert server.post("/feedback", pick).status_code == 201
    text = {"id": third["id"], "text": "Because of 42."}
    assert server.post("/feedback", text).status_code == 201
    said = {r.note: r for record in store.ranked_prompts() for r in record.rankings}
    assert said["call ***"].flags == ("thumbs-up",)
    assert {r.annotator for r in said.values()} == {"app"}
    written = [r.text for record in store.ranked_prompts() for r in record.responses]
    assert "Because of **." in written
    after = server.get("/comparison").json()
    side = find_served(store.connections.db, first["id"]).variant
    assert after[side]["up"] == before[side]["up"] + 1
    assert after["policy"]["name"] == f"new at {upstream.url}"
    metrics = server.metrics()
    assert metrics[f'thumbs_total{{policy="{side}",thumb="up"}}'] == after[side]["up"]
    assert metrics["feedback_total"] == counted["feedback_total"] + 3
    assert metrics["running"] == 0
    assert metrics["kept_total"] == counted["kept_total"] + 3
    asked = [f'requests_total{{policy="{name}"}}' for name in ("policy", "against")]
    assert sum(metrics[name] - counted[name] for name in asked) == 3
    assert metrics['thumbs_difference{end="low"}'] == after["difference"]["low"]


def test_what_is_kept_is_redacted_and_what_is_sent_is_not(server, upstream, original, store):
    upstream.streams = original.streams = False
    found = server.ask("I am 25.")
    assert kept(store, found["id"])[0] == "I am **."
    sent = [call["messages"][0]["content"] for call in upstream.calls + original.calls]
    assert "I am 25." in sent


def test_texts_in_parts_are_kept_and_pictures_are_not(server, upstream, original, store):
    upstream.streams = original.streams = False
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    found = server.ask(parts)
    assert kept(store, found["id"])[0] == "Hi\nthere"
    found = server.ask([*parts, {"type": "image_url", "image_url": {"url": "data:,"}}])
    refused = server.post("/feedback", {"id": found["id"], "thumbs": "up"})
    assert refused.status_code == 404
    assert "No response with the id 'chatcmpl-" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        ("500", 502, "The model server failed with status 500"),
        ("429", 429, "not now"),
        ("400", 400, "not now"),
        ("401", 502, "failed with status 401"),
        ("foreign", 502, "The model server cannot be used: no chat completion"),
    ],
)
def test_failures_behind_are_openai_errors(server, upstream, original, failure, status, words):
    upstream.failures = original.failures = [failure]
    before = server.metrics()["failures_total"]
    with pytest.raises(openai.APIStatusError) as caught:
        server.openai.chat.completions.create(model="policy", messages=HI)
    assert caught.value.status_code == status
    assert words in caught.value.body["message"]
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert server.metrics()["failures_total"] == before + 1


@pytest.mark.parametrize("failure", ["cut", "error"])
def test_a_stream_that_breaks_says_so_and_is_not_kept(server, upstream, original, failure):
    upstream.failures = original.failures = [failure]
    before = server.metrics()
    stream = server.openai.chat.completions.create(model="policy", messages=HI, stream=True)
    with stream, pytest.raises(openai.APIError, match="The model server ended its answer early"):
        list(stream)
    after = server.metrics()
    assert after["kept_total"] == before["kept_total"]
    assert (after["failures_total"], after["running"]) == (before["failures_total"] + 1, 0)


def test_an_app_that_leaves_early_ends_the_request_behind(server, upstream, original):
    upstream.gate.clear()
    original.gate.clear()
    body = {"model": "policy", "messages": HI, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        assert server.metrics()["running"] == 1
    wait_until(lambda: server.metrics()["running"] == 0)
    before = upstream.abandoned + original.abandoned
    upstream.gate.set()
    original.gate.set()
    wait_until(lambda: upstream.abandoned + original.abandoned == before + 1)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": HI}, 404, "There is no model None. Send model='policy'."),
        ({"model": "gpt", "messages": HI}, 404, "There is no model 'gpt'"),
        ({"model": "policy"}, 400, "messages must be a list"),
        ({"model": "policy", "messages": ["Hi"]}, 400, "Every message must be an object"),
        ({"model": "policy", "messages": HI, "n": 2}, 400, "n is 2. Send one request for each"),
        ({"model": "policy", "messages": HI, "stream": "yes"}, 400, "stream must be true or false"),
        (["policy"], 400, "The body is a JSON list, not an object"),
        (
            {"model": "policy", "messages": [{"role": "user", "content": "x" * 2**23}]},
            413,
            "larger",
        ),
    ],
    ids=["none", "other", "messages", "texts", "n", "stream", "list", "large"],
)
def test_wrong_requests_are_explained(server, body, status, words):
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_wrong_feedback_and_wrong_addresses_are_explained(server):
    answer = server.post("/feedback", {"id": "chatcmpl-7", "thumbs": "sideways"})
    assert answer.status_code == 400
    assert "thumbs is 'sideways'. Send up or down" in answer.json()["error"]["message"]
    answer = server.post("/v1/completions", {})
    assert answer.json()["error"]["message"] == "There is no POST /v1/completions here."
    assert server.get("/feedback").status_code == 405


def test_pages_of_other_sites_may_not_use_it(server):
    thumb = {"id": "c", "thumbs": "up"}
    assert server.post("/feedback", thumb, origin="https://evil.example").status_code == 403
    assert server.post("/feedback", thumb, origin=server.url).status_code == 404
    assert server.get("/v1/models", host="evil.example:8001").status_code == 403


def test_health_says_which_server_is_down_and_requests_fail_meanwhile(tmp_path):
    with ChatServer() as upstream:
        port = free_port()
        against = ("--against", "old", "--against-endpoint", f"http://127.0.0.1:{port}/v1")
        with served_policy("--endpoint", upstream.url, *against, "--share", "99.9999%") as proxy:
            answer = proxy.get("/health")
            assert answer.status_code == 503
            assert answer.json()["models"]["policy"] == "ready"
            assert answer.json()["models"]["against"] != "ready"
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                proxy.openai.chat.completions.create(model="policy", messages=HI)
            answer = proxy.post("/feedback", {"id": "c", "thumbs": "up"})
            assert answer.json()["error"]["message"] == (
                "Nothing is kept: start rlhf serve with --db."
            )
            code, out, said = proxy.stop()
    assert (code, out) == (
        0, "Answered 0 requests, 1 failed; nothing was kept, as there is no --db.\n"
    )  # fmt: skip
    assert "OpenAI clients: base_url=http://127.0.0.1:" in said


def test_best_of_four_has_the_highest_reward_and_streams_too(upstream, tmp_path):
    answers = ["bcd", "aeiou", "a", "xyz"]
    with ChatServer() as behind:
        behind.answers, behind.streams = answers, False
        reward = ("--best-of", "4", "--reward", "signal:tests.pipeline.signals:count_vowels")
        with served_policy(
            "--endpoint", behind.url, *reward, "--db", tmp_path / "a.db", "--keep.share", "0.001%"
        ) as proxy:
            found = proxy.ask(seed=7)
            assert found["choices"][0]["message"]["content"] == "aeiou"
            assert sorted(call["seed"] for call in behind.calls) == [7, 8, 9, 10]
            assert {call["temperature"] for call in behind.calls} == {1.0}
            asked = {"model": "policy", "messages": HI, "stream": True}
            events = list(proxy.openai.chat.completions.create(**asked))
            assert "".join(one.choices[0].delta.content or "" for one in events) == "aeiou"
            assert events[-1].choices[0].finish_reason == "stop"
            answer = proxy.post("/feedback", {"id": found["id"], "thumbs": "up"})
            assert answer.status_code == 404
            assert "--keep.share" in answer.json()["error"]["message"]
            behind.failures = ["500"]
            assert proxy.post("/v1/chat/completions", asked).status_code == 502


def test_other_machines_need_a_token(upstream, tmp_path, refused, run_json):
    upstream.streams = False
    db = tmp_path / "labels.db"
    command = ("--endpoint", upstream.url, "--host", "0.0.0.0", "--db", db)
    said = refused("serve", *command, "--port", free_port())
    assert "nobody has a token" in said
    assert f"rlhf users token NAME --db {db}" in said
    token = run_json("users", "token", "shop", "--db", db)["token"]
    with served_policy(*command) as proxy:
        assert proxy.get("/v1/models").status_code == 401
        assert proxy.get("/metrics").status_code == 401
        assert proxy.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError, match="rlhf users token"):
            proxy.openai.chat.completions.create(model="policy", messages=HI)
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=token) as client:
            found = client.chat.completions.create(model="policy", messages=HI)
        key = {"authorization": f"Bearer {token}"}
        thumb = {"id": found.id, "thumbs": "down"}
        assert proxy.post("/feedback", thumb).status_code == 401
        assert proxy.post("/feedback", thumb, **key).status_code == 201
    with Store(db) as store:
        [record] = store.ranked_prompts()
        assert json.dumps([r.annotator for r in record.rankings]) == '["shop"]'
