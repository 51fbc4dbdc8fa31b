"""One request in the protocol of chat completions, to a real server."""

import json

import pytest

from rlhf.endpoints.chat_completions import key_header, open_completion
from rlhf.errors import InputError
from tests.servers.chat import ChatServer


def test_the_body_arrives_with_the_key_and_the_answer_can_be_read(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "k1")
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi?"}]}
    with ChatServer() as server:
        server.streams = False
        with open_completion(
            server.url + "/", body, key_variable="SOME_KEY", timeout_seconds=10
        ) as answer:
            [choice] = json.loads(answer.read())["choices"]
    assert choice["message"]["content"] == "one two three"
    assert server.calls == [{"path": "/v1/chat/completions", "key": "Bearer k1", **body}]


def test_a_key_is_sent_without_the_line_end_of_its_file(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "k1\n")
    assert key_header("SOME_KEY") == {"Authorization": "Bearer k1"}


@pytest.mark.parametrize("key", ["secret\nsecret", "sécret", "secret\x7f"])
def test_a_key_that_fits_no_header_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(InputError, match="The key in SOME_KEY has characters") as caught:
        key_header("SOME_KEY")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_without_a_key_there_is_no_header(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "")
    assert key_header("SOME_KEY") == key_header("NO_SUCH_KEY") == {}
