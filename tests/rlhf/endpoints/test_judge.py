"""What a judge's words mean; the asking itself is tested through `rlhf annotate` and `evaluate`."""

import re

import pytest

from rlhf.endpoints import judge
from rlhf.errors import InputError
from tests.servers.judge import JudgeServer

SETTINGS = ("temperature", "max_tokens", "max_completion_tokens")


def test_verdicts():
    assert judge.read_verdict("[[B]] at first, but [[ a ]]") == "first"
    assert judge.read_verdict("[[TIE]]") == judge.read_verdict("[[C]]") == "tie"
    assert judge.read_verdict("A is better") == "unclear"
    assert judge.combine_verdicts("first", "second") == "first"
    assert judge.combine_verdicts("second", "first") == "second"
    assert judge.combine_verdicts("first", "first") == "tie"  # A both times: drawn to the place
    assert judge.combine_verdicts("tie", "second") == "tie"
    assert judge.combine_verdicts("unclear", "first") is None


QUESTION = judge.build_request("Which?", "a long answer", "short", rubric="")


@pytest.mark.parametrize("setting", ["max_tokens", "temperature"])
def test_a_server_that_refuses_greedy_short_answers_is_asked_as_reasoning_models_are(setting):
    with JudgeServer() as server:
        server.refuses, server.thinking_seconds = {setting}, 0.6
        endpoint = judge.Endpoint(url=server.url, model="m", timeout_seconds=0.5)
        assert judge.read_verdict(judge.complete(endpoint, QUESTION)) == "first"
    asked = [{key: call.get(key) for key in SETTINGS} for call in server.calls]
    assert asked == [
        {"temperature": 0, "max_tokens": 512, "max_completion_tokens": None},
        {"temperature": None, "max_tokens": None, "max_completion_tokens": 8192},
    ]


@pytest.mark.parametrize(
    ("refused", "calls", "shown"),
    [({"messages"}, 1, "messages"), ({"max_tokens", "max_completion_tokens"}, 2, "max_tokens")],
)
def test_the_first_refusal_is_shown(refused, calls, shown):
    with JudgeServer() as server:
        server.refuses = refused
        with pytest.raises(InputError, match=r"\(status 400\)") as caught:
            judge.complete(judge.Endpoint(url=server.url, model="m"), QUESTION)
    assert len(server.calls) == calls
    assert re.findall("max_tokens|messages|max_completion", caught.value.problem) == [shown]
