"""What is kept of an answer: whose words, what is left out, and what an app sees if it fails."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from policies.serving.proxy import Policies, Proxy, ServedPolicy
from policies.serving.retention import ChatRequest, Retention, served_response
from policies.serving.servers.events import MAX_TEXT, Completion
from policies.serving.servers.upstream import Upstream, unreachable
from policies.serving.split import Conversation, Split
from rlhf.endpoints.signals import load_redaction
from rlhf.records.served import ServedResponse
from tests.servers.chat import ChatServer
from tests.servers.coroutines import run_alone
from tests.servers.served_policy import PolicyServer, served_policy

REDACTIONS = "tests.policies.serving.redaction"
MODEL = {"path": "m", "hash": "abc"}


class Records:
    """Keeps answers in memory."""

    def __init__(self) -> None:
        self.kept: list[ServedResponse] = []

    async def keep(self, served: ServedResponse) -> None:
        self.kept.append(served)


def asked(text: str = "I am 25.", **more: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": text, **more}]}
    return ChatRequest(
        id="chatcmpl-1", body=body, conversation=Conversation("chatcmpl-1", "policy")
    )


def said(text: str, **more: Any) -> Completion:
    answer = Completion()
    answer.add({"content": text, **more}, "stop")
    return answer


def test_prompt_and_response_are_redacted() -> None:
    retention = Retention(records=Records(), redact=load_redaction(f"{REDACTIONS}:without_digits"))
    found = served_response(retention, asked(), said("You were 24."), MODEL)
    assert found is not None
    assert (found.prompt.text, found.response.text) == ("I am **.", "You were **.")
    assert (found.response.model_fingerprint, found.response.finished) == ("abc", True)


@pytest.mark.parametrize(("is_ambiguous", "comparison"), [(False, 7), (True, None)])
def test_feedback_on_what_may_be_another_conversation_is_not_compared(
    is_ambiguous: bool, comparison: int | None
) -> None:
    retention = Retention(records=Records(), comparison=7)
    conversation = Conversation("chatcmpl-1", "policy", is_ambiguous)
    found = served_response(
        retention, replace(asked(), conversation=conversation), said("Yes."), MODEL
    )
    assert found is not None
    assert found.comparison == comparison


@pytest.mark.parametrize(
    "answer",
    [said("Look.", tool_calls=[{"id": "t"}]), said(" \n"), said("x" * (MAX_TEXT + 1))],
    ids=["tools", "blank", "long"],
)
def test_what_nobody_could_judge_is_not_kept(answer: Completion) -> None:
    retention = Retention(records=Records())
    assert served_response(retention, asked(), said("Yes."), MODEL) is not None
    assert served_response(retention, asked(), answer, MODEL) is None


def test_an_app_gets_its_answer_where_the_redaction_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = Records()
    retention = Retention(records=records, redact=load_redaction(f"{REDACTIONS}:broken"))
    policy = ServedPolicy(
        description=MODEL, upstream=Upstream(url="http://a/v1", model="m", headers={})
    )
    policies = Policies(by_variant={"policy": policy}, split=Split(0.0), retention=retention)
    proxy = Proxy(policies, None, 1.0)
    for _ in range(2):
        run_alone(proxy._finish(asked("My secret"), policies, said("Yes.")))
    assert (proxy.counts.kept, proxy.counts.not_kept, records.kept) == (0, 2, [])
    words = capsys.readouterr().err
    assert words.count("A response could not be kept") == 1
    assert "secret" not in words


def test_a_silent_server_is_told_from_one_that_is_away() -> None:
    assert unreachable(httpx.ReadTimeout("")).status == 504
    assert unreachable(httpx.ConnectTimeout("")).status == 502
    assert unreachable(httpx.ConnectError("refused")).status == 502


# ----------------------------------------------------------------- a database that keeps nothing


BEST_OF = ("--best-of", "2", "--reward", "signal:tests.pipeline.signals:count_letters")
HI = [{"role": "user", "content": "Hi?"}]


@pytest.fixture(scope="module")
def upstream() -> Iterator[ChatServer]:
    with ChatServer() as server:
        server.answers = ["one two three"]
        yield server


@pytest.fixture(params=[(), BEST_OF], ids=["one", "best-of"], scope="module")
def full(
    request: pytest.FixtureRequest, upstream: ChatServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PolicyServer]:
    """A proxy whose database refuses every response from now on."""
    db = tmp_path_factory.mktemp("full") / "labels.db"
    upstream.streams = not request.param
    with served_policy("--endpoint", upstream.url, "--db", db, *request.param) as server:
        with closing(sqlite3.connect(db)) as opened:
            opened.execute(
                "CREATE TRIGGER full BEFORE INSERT ON served"
                " BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            )
        yield server


def test_a_stream_that_could_not_be_kept_does_not_end_as_one_that_was(full: PolicyServer) -> None:
    stream = full.openai.chat.completions.create(model="policy", messages=HI, stream=True)
    said: list[str] = []
    with stream, pytest.raises(openai.APIError) as caught:
        said.extend(event.choices[0].delta.content or "" for event in stream)
    assert "".join(said) == "one two three"
    assert caught.value.message == (
        "The response is complete, and could not be kept (disk is full): it takes no feedback."
    )
    assert (caught.value.type, caught.value.code) == ("server_error", "not_kept")
    body = {"model": "policy", "messages": HI, "stream": True}
    assert "[DONE]" not in full.post("/v1/chat/completions", body).text
    metrics = full.metrics()
    assert (metrics["keep_failures_total"], metrics["kept_total"], metrics["running"]) == (2, 0, 0)


def test_a_whole_response_that_could_not_be_kept_says_so_in_a_header(
    full: PolicyServer, upstream: ChatServer
) -> None:
    upstream.streams = False
    asking = full.openai.chat.completions.with_raw_response
    raw = asking.create(model="policy", messages=HI, stream=False)
    assert raw.headers["x-rlhf-kept"] == "false"
    found = raw.parse()
    assert found.choices[0].message.content == "one two three"
    refused = full.post("/feedback", {"id": found.id, "thumbs": "up"})
    assert refused.status_code == 404
