"""uvicorn with limits, so that idle connections cannot block the board for everybody.

uvicorn waits without limit for the headers and body of a request, and stops accepting connections
when the process runs out of file descriptors. Here each wait has a time limit, and when there are
too many connections, one is closed: from the address that has the most.
"""

import asyncio
import logging
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # to send the headers of a request
BODY_SECONDS = 30.0  # to send its body; the largest is 1 MB
READ_SECONDS = 30.0  # to read what has been sent so far
CLOSE_SECONDS = 10.0  # to read the rest of the last answer
SHUTDOWN_SECONDS = 5  # for answers that are still being streamed
MAX_CONNECTIONS = 2000
WANTED_FILES = 4096
# asyncio accepts this many connections in one turn of its loop. With as many as the limit, a
# connection could be closed before its request is read.
ACCEPTED_AT_ONCE = 16
# How often a computing thread (rendering a long table) gives way to others. A request switches
# threads dozens of times: with Python's default of 5 ms it would take half a second.
SWITCH_SECONDS = 0.001
BACKLOG = 1024  # connections that wait in the kernel to be accepted


class State(NamedTuple):
    """What a connection waits for, in which request; None is no limit."""

    limit_seconds: float | None
    request: object


class Connections:
    """The open connections of a server, at most `max_connections`."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        # The connections of each address, least recently used first.
        self._open: dict[str, dict[LimitedProtocol, None]] = {}
        self._num_open = 0

    def add(self, connection: "LimitedProtocol") -> None:
        """Add a new connection.

        If there are too many, close one from the address that has the most: the one that has waited
        longest for its client, or the new one if all others are being answered.
        """
        self._open.setdefault(connection.address(), {})[connection] = None
        self._num_open += 1
        if self._num_open > self.max_connections:
            largest = max(self._open.values(), key=len)
            waiting = (
                candidate for candidate in largest if candidate.state().limit_seconds is not None
            )
            self._abort(next(waiting, connection))

    def touch(self, connection: "LimitedProtocol") -> None:
        """A request of this connection was answered."""
        others = self._open.get(connection.address(), {})
        if connection in others:
            others[connection] = others.pop(connection)

    def discard(self, connection: "LimitedProtocol") -> None:
        """This connection is closed."""
        address = connection.address()
        others = self._open.get(address, {})
        if connection in others:
            del others[connection]
            self._num_open -= 1
            if not others:
                del self._open[address]

    def abort_late(self, now: float) -> None:
        """Close connections that have been in one state for too long; call it often."""
        for connection in [connection for group in self._open.values() for connection in group]:
            state, since = connection.state(), connection.since
            if since is None or since[0] != state:
                connection.since = state, now
            elif state.limit_seconds is not None and now - since[1] >= state.limit_seconds:
                self._abort(connection)

    def _abort(self, connection: "LimitedProtocol") -> None:
        self.discard(connection)
        connection.transport.abort()


class LimitedConfig(uvicorn.Config):
    """uvicorn's configuration with a limit on connections."""

    def __init__(self, app: ASGIApp, *, max_connections: int, **settings: Any) -> None:
        # Not httptools, even if it is installed: it accepts headers of any size.
        super().__init__(app, http=LimitedProtocol, ws="none", backlog=ACCEPTED_AT_ONCE, **settings)
        self.limited = Connections(max_connections)


class LimitedProtocol(H11Protocol):
    """One connection."""

    config: LimitedConfig
    since: tuple[State, float] | None = None

    def address(self) -> str:
        """The client's address; empty if unknown."""
        return self.client[0] if self.client else ""

    def state(self) -> State:
        """What the connection waits for."""
        cycle = self.cycle
        if self.transport.is_closing():
            return State(CLOSE_SECONDS, cycle)
        if cycle is None or cycle.response_complete:
            return State(HEAD_SECONDS, cycle)
        if self.flow.write_paused:
            return State(READ_SECONDS, cycle)
        return State(BODY_SECONDS if cycle.more_body else None, cycle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection."""
        super().connection_made(transport)
        self.config.limited.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self.config.limited.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note that the connection was used."""
        self.config.limited.touch(self)
        super().on_response_complete()


class LimitedServer(uvicorn.Server):
    """A server that closes connections after their time limit."""

    config: LimitedConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                with listening.dup() as same:
                    same.listen(BACKLOG)  # asyncio uses one number for this and for one turn

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            self.config.limited.abort_late(time.monotonic())
        return await super().on_tick(counter)


class OncePerSecond(logging.Filter):
    """Passes one log message per second, logger and level, and says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is written."""
        kind = record.name, record.levelno
        at, left_out = self._last.get(kind, (-1.0, 0))
        if 0 <= record.created - at < 1:
            self._last[kind] = at, left_out + 1
            return False
        self._last[kind] = record.created, 0
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} messages were left out before this)"
            record.args = ()
        return True


def serve_app(app: ASGIApp, listening: list[socket.socket]) -> None:
    """Serve an application on sockets that listen, until it is interrupted."""
    sys.setswitchinterval(SWITCH_SECONDS)
    server = LimitedServer(configure(app))
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(OncePerSecond())
    with suppress(KeyboardInterrupt):
        server.run(sockets=listening)


def configure(app: ASGIApp) -> LimitedConfig:
    """The server's settings; also raises this process's limit on open files.

    `X-Forwarded-For` is accepted only from the addresses in FORWARDED_ALLOW_IPS, by default from
    none. Otherwise programs on this machine, and clients of a proxy that passes the header on,
    could claim any address.
    """
    return LimitedConfig(
        app,
        max_connections=min(
            MAX_CONNECTIONS, raise_file_limit() // 2
        ),  # the rest is for the database
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", ""),
    )


def raise_file_limit() -> int:
    """Raise this process's limit on open files as far as allowed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
