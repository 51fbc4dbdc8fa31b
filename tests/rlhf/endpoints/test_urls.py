"""What is left of a request that a real server refuses."""

from urllib.error import HTTPError
from urllib.request import Request

import psutil
import pytest

from rlhf.endpoints.urls import open_url
from tests.servers.judge import JudgeServer


def open_connections(port: int) -> set[tuple]:
    """This process's connections to a server on that port, each by its end here."""
    connections = psutil.Process().net_connections("tcp4")
    return {one.laddr for one in connections if one.raddr and one.raddr.port == port}


def test_a_refusal_keeps_its_words_and_no_connection():
    with JudgeServer() as server:
        server.refuses = {"temperature"}
        request = Request(server.url, b'{"temperature": 0}')
        with pytest.raises(HTTPError) as caught, open_url(request, timeout_seconds=10):
            pass
        assert open_connections(server.server_port) == set()
        assert caught.value.code == 400
        assert b"Not here" in caught.value.read()


def test_an_answer_keeps_its_connection_until_it_is_read():
    question = "# Answer of assistant A\\nyes\\n\\n# Answer of assistant B\\nno"
    body = f'{{"messages": [{{"content": "{question}"}}]}}'.encode()
    with JudgeServer() as server:
        with open_url(Request(server.url, body), timeout_seconds=10) as answer:
            assert len(open_connections(server.server_port)) == 1
            assert b"[[A]]" in answer.read()
        assert open_connections(server.server_port) == set()
