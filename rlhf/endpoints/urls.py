"""Opening a URL: within a time for the whole answer, and never another address than the one given.

A server that refuses keeps no connection of ours open. One that sends its answer byte by byte is
cut off, and so are all when the block of an `AskingPool` is interrupted.
"""

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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

MAX_REFUSAL_BYTES = 10_000
MAX_ANSWER_BYTES = 2**26
CONNECT_SECONDS = 10.0


@final
class DeadlineError(TimeoutError):
    """The whole answer did not come in time, or nobody waits for it any more."""


@contextmanager
def open_url(
    request: urllib.request.Request, *, timeout_seconds: float, total_seconds: float | None = None
) -> Iterator[HTTPResponse]:
    """The server's answer, open to be read, for a `with` block.

    Redirections are refused as any status that is no success: they would take a key in the headers
    to another host.

    Args:
        request: the address, with what is sent there.
        timeout_seconds: of silence.
        total_seconds: from the start to the end of the block; as much as of silence when not given.

    Raises:
        HTTPError: the server refuses; its words, up to `MAX_REFUSAL_BYTES`, can be read from the
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
                words = BytesIO(error.read(MAX_REFUSAL_BYTES))
            raise HTTPError(error.url, error.code, error.msg, error.headers, words) from None
        with opened:
            yield opened


def read_answer(answer: HTTPResponse) -> bytes:
    """All of an answer.

    Raises:
        HTTPException: it is longer than `MAX_ANSWER_BYTES`, or shorter than the server said.
    """
    content = answer.read(MAX_ANSWER_BYTES + 1)
    if len(content) > MAX_ANSWER_BYTES:
        raise HTTPException(f"more than {MAX_ANSWER_BYTES:,} bytes")
    if answer.length:  # still to come, where the server said how much
        raise IncompleteRead(content, answer.length)
    return content


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


@final
class _Deadline:
    """Shuts the connections of one request when its time is over; a context manager.

    Args:
        seconds: from the start of the block to its end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True

    def connect(self, address: tuple[str, int], timeout: float, *others: Any) -> socket.socket:
        """A connection that ends with the deadline, in the middle of a handshake if need be."""
        opened = socket.create_connection(address, min(timeout, CONNECT_SECONDS), *others)
        opened.settimeout(timeout)
        with self._lock:
            self._connections.append(opened.dup())  # TLS takes the other from its object
        if self._over.is_set():
            self.end()
        return opened

    def end(self) -> None:
        """Let whoever waits for the server go."""
        self._over.set()
        with self._lock, suppress(OSError):
            for one in self._connections:
                one.shutdown(socket.SHUT_RDWR)

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
            for one in self._connections:
                one.close()
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
        """Open a connection that the deadline ends."""
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
class AskingPool(ThreadPoolExecutor):
    """Threads that ask servers; Ctrl-C or a signal in the block ends what they wait for.

    After an ordinary error what was asked already is waited for, and the rest is not asked.

    Args:
        parallel: requests at one time.
    """

    def __init__(self, parallel: int) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[_Deadline] = set()
        super().__init__(parallel, initializer=setattr, initargs=(_here, "pool", self))

    def add(self, request: _Deadline) -> None:
        """Count a request of a thread as open."""
        with self._lock:
            self._open.add(request)
        if self.stopped.is_set():
            request.end()

    def discard(self, request: _Deadline) -> None:
        """Count it as done."""
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
        for one in requests:
            one.end()


def nobody_waits() -> threading.Event | None:
    """Set once nobody waits for this thread's answers any more; None in a thread of no pool."""
    pool: AskingPool | None = getattr(_here, "pool", None)
    return None if pool is None else pool.stopped
