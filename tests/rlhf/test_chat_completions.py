"""One request in the protocol of chat completions, to a real server."""

import json

from rlhf.chat_completions import key_header, open_completion
from tests.chat_server import ChatServer


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


def test_without_a_key_there_is_no_header(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "")
    assert key_header("SOME_KEY") == key_header("NO_SUCH_KEY") == {}
