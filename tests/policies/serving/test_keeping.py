"""What is kept of an answer, without a server: whose words, and what is left out."""

from typing import Any

import httpx
import pytest

from policies.serving.keeping import Asked, Keeping, served_response
from policies.serving.proxy import Proxy, Side
from policies.serving.servers.events import MAX_TEXT, Answer
from policies.serving.servers.upstream import Upstream, unreachable
from policies.serving.split import Conversation, Split
from rlhf.endpoints.signals import load_redaction
from rlhf.records.served import ServedResponse
from tests.servers.coroutines import run_alone

REDACTIONS = "tests.policies.serving.redaction"
MODEL = {"path": "m", "hash": "abc"}


class Records:
    """Keeps answers in memory."""

    def __init__(self) -> None:
        self.kept: list[ServedResponse] = []

    async def keep(self, served: ServedResponse) -> None:
        self.kept.append(served)


def asked(text: str = "I am 25.", **more: Any) -> Asked:
    body = {"messages": [{"role": "user", "content": text, **more}]}
    return Asked(id="chatcmpl-1", body=body, conversation=Conversation("chatcmpl-1", "policy"))


def said(text: str, **more: Any) -> Answer:
    answer = Answer()
    answer.add({"content": text, **more}, "stop")
    return answer


def test_prompt_and_response_are_redacted() -> None:
    keeping = Keeping(records=Records(), redact=load_redaction(f"{REDACTIONS}:without_digits"))
    found = served_response(keeping, asked(), said("You were 24."), MODEL)
    assert found is not None
    assert (found.prompt.text, found.response.text) == ("I am **.", "You were **.")
    assert (found.response.model_fingerprint, found.response.finished) == ("abc", True)


@pytest.mark.parametrize(
    "answer",
    [said("Look.", tool_calls=[{"id": "t"}]), said(" \n"), said("x" * (MAX_TEXT + 1))],
    ids=["tools", "blank", "long"],
)
def test_what_nobody_could_judge_is_not_kept(answer: Answer) -> None:
    keeping = Keeping(records=Records())
    assert served_response(keeping, asked(), said("Yes."), MODEL) is not None
    assert served_response(keeping, asked(), answer, MODEL) is None


def test_an_app_gets_its_answer_where_the_redaction_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = Records()
    keeping = Keeping(records=records, redact=load_redaction(f"{REDACTIONS}:broken"))
    side = Side(description=MODEL, upstream=Upstream(url="http://a/v1", model="m", headers={}))
    proxy = Proxy({"policy": side}, Split(0.0), keeping, None, 1.0)
    for _ in range(2):
        run_alone(proxy._finish(asked("My secret"), said("Yes.")))
    assert (proxy.counts.kept, proxy.counts.not_kept, records.kept) == (0, 2, [])
    words = capsys.readouterr().err
    assert words.count("A response could not be kept") == 1
    assert "secret" not in words


def test_a_silent_server_is_told_from_one_that_is_away() -> None:
    assert unreachable(httpx.ReadTimeout("")).status == 504
    assert unreachable(httpx.ConnectTimeout("")).status == 502
    assert unreachable(httpx.ConnectError("refused")).status == 502
