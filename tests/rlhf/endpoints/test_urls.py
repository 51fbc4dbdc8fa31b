"""What is left of a request that a real server refuses."""

import socket
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request

import psutil
import pytest

from rlhf.endpoints.urls import listen, open_url, require_free_port
from rlhf.errors import InputError
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


def test_a_port_that_is_taken_is_an_error_in_words():
    """A program that comes second, even between a check and the start, is told so."""
    [first] = listen("127.0.0.1", 0)
    with first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"Port {port} of 127.0.0.1 cannot be used"):
            listen("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_connections_wait_for_no_full_packet():
    """asyncio switches Nagle's algorithm off only for sockets that say they are TCP."""
    [one] = listen("127.0.0.1", 0)
    with one:
        assert one.proto == socket.IPPROTO_TCP


def test_a_name_is_listened_to_at_all_its_addresses():
    expected = set()
    for family, *_, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family) as one:  # IPv6 may be switched off
            one.bind(address)
            expected.add((family, address[0]))
    listening = listen("localhost", 0)
    found = {(one.family, one.getsockname()[0]) for one in listening}
    for one in listening:
        one.close()
    assert found == expected
