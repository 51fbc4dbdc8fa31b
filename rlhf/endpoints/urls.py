"""Opens URLs with a deadline for the whole answer, and follows no redirects.

A connection is closed when the server refuses the request, when the deadline passes, and when the
block of a `RequestPool` is interrupted.
"""

import errno
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from io import BytesIO
from types import TracebackType
from typing import Any, final
from urllib.error import HTTPError

from rlhf.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names by which only this machine connects
MAX_REFUSAL_BYTES = 10_000
MAX_ANSWER_BYTES = 2**26
CONNECT_SECONDS = 10.0


def http_address(host: str, port: int) -> str:
    """The address of a server here; ("::1", 80) → "http://[::1]:80"."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def require_free_port(host: str, port: int) -> None:
    """Check that nobody listens there, before anything is loaded.

    Raises:
        InputError: the address cannot be used.
    """
    for listener in listen(host, port):
        listener.close()


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host.

    Raises:
        InputError: the address cannot be used.
    """
    with ExitStack() as stack:
        try:
            kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
            addresses = dict.fromkeys(
                socket.getaddrinfo(host or None, port, type=kind, flags=flags)
            )
            listening = [
                stack.enter_context(listener)
                for family, _, protocol, _, address in addresses
                if (listener := _bind(family, protocol, address, may_lack=len(addresses) > 1))
            ]
            for listener in listening:
                listener.listen()
        except OSError as error:
            raise InputError(
                f"Port {port} of {host} cannot be used ({error.strerror})",
                f"Choose another: --port {port + 1}, or another --host",
            ) from None
        stack.pop_all()
    return listening


def _bind(family: int, protocol: int, address: Any, *, may_lack: bool) -> socket.socket | None:
    """A socket at an address; None if the machine has no such addresses and `may_lack` them.

    `localhost` is also an IPv6 address on machines where IPv6 is switched off.
    """
    try:
        with ExitStack() as stack:
            new = stack.enter_context(socket.socket(family, socket.SOCK_STREAM, protocol))
            new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                new.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            new.bind(address)
            stack.pop_all()
            return new
    except OSError as error:
        if may_lack and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        raise


@final
class DeadlineError(TimeoutError):
    """The whole answer did not come in time, or the request was abandoned."""


@contextmanager
def open_url(
    request: urllib.request.Request, *, timeout_seconds: float, total_seconds: float | None = None
) -> Iterator[HTTPResponse]:
    """The server's answer, open to be read, for a `with` block.

    A redirect is an error, as following it would send a key in the headers to another host.

    Args:
        request: the address and what is sent.
        timeout_seconds: longest pause in the answer.
        total_seconds: limit for the whole block; by default `timeout_seconds`.

    Raises:
        HTTPError: the server refuses; up to `MAX_REFUSAL_BYTES` of its message can be read from the
            error, and its connection is closed.
        DeadlineError: the block did not end in `total_seconds`.
        URLError, TimeoutError, ConnectionError, HTTPException: as urllib does.
    """
    seconds = timeout_seconds if total_seconds is None else total_seconds
    deadline = _Deadline(seconds)
    opener = urllib.request.build_opener(_NoRedirection(), _Http(deadline), _Https(deadline))
    with deadline:
        try:
            opened: HTTPResponse = opener.open(request, timeout=timeout_seconds)
        except HTTPError as error:
            with error:
                body = BytesIO(error.read(MAX_REFUSAL_BYTES))
            raise HTTPError(error.url, error.code, error.msg, error.headers, body) from None
        with opened:
            yield opened


def read_answer(answer: HTTPResponse) -> bytes:
    """All of an answer.

    Raises:
        HTTPException: it is longer than `MAX_ANSWER_BYTES`, or shorter than announced.
    """
    content = answer.read(MAX_ANSWER_BYTES + 1)
    if len(content) > MAX_ANSWER_BYTES:
        raise HTTPException(f"more than {MAX_ANSWER_BYTES:,} bytes")
    if answer.length:  # announced and not received
        raise IncompleteRead(content, answer.length)
    return content


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Do not follow a redirect."""


@final
class _Deadline:
    """Context manager that shuts the connections of one request after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True

    def connect(self, address: tuple[str, int], timeout: float, *others: Any) -> socket.socket:
        """A connection that the deadline shuts, even during a handshake."""
        opened = socket.create_connection(address, min(timeout, CONNECT_SECONDS), *others)
        opened.settimeout(timeout)
        with self._lock:
            self._connections.append(opened.dup())  # TLS takes the other from its object
        if self._over.is_set():
            self.end()
        return opened

    def end(self) -> None:
        """Shut the connections, which ends any wait for the server."""
        self._over.set()
        with self._lock, suppress(OSError):
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> None:
        pool = getattr(_here, "pool", None)
        if pool is not None:
            pool.add(self)
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections = []
        pool = getattr(_here, "pool", None)
        if pool is not None:
            pool.discard(self)
        is_late = self._over.is_set() or time.monotonic() >= self._ends_at
        if is_late and (kind is None or issubclass(kind, Exception)):
            raise DeadlineError(f"no whole answer within {self._seconds:g} seconds") from None


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        """Open a connection that the deadline shuts."""
        return self.do_open(_building(HTTPConnection, self._deadline), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        """The same over TLS."""
        return self.do_open(_building(HTTPSConnection, self._deadline), request)


def _building(kind: type[HTTPConnection], deadline: _Deadline) -> Any:
    def build(host: str, **settings: Any) -> HTTPConnection:
        connection = kind(host, **settings)
        vars(connection)["_create_connection"] = deadline.connect
        return connection

    return build


_here = threading.local()  # `pool` of the thread, where it has one


@final
class RequestPool(ThreadPoolExecutor):
    """Threads that send requests; Ctrl-C or a signal in the block aborts those under way.

    After any other error, requests under way are completed and the others are not sent.
    """

    def __init__(self, parallel: int) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[_Deadline] = set()
        super().__init__(parallel, initializer=setattr, initargs=(_here, "pool", self))

    def add(self, request: _Deadline) -> None:
        """Register a request under way."""
        with self._lock:
            self._open.add(request)
        if self.stopped.is_set():
            request.end()

    def discard(self, request: _Deadline) -> None:
        """Remove a request that has ended."""
        with self._lock:
            self._open.discard(request)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._stop()
        try:
            self.shutdown(cancel_futures=kind is not None)
        except BaseException:  # a second signal
            self._stop()
            raise

    def _stop(self) -> None:
        self.stopped.set()
        with self._lock:
            requests = list(self._open)
        for request in requests:
            request.end()


def stop_event() -> threading.Event | None:
    """The event that is set when this thread's pool is interrupted; None outside a pool."""
    pool: RequestPool | None = getattr(_here, "pool", None)
    return None if pool is None else pool.stopped
