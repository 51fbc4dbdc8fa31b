"""uvicorn with limits, so that connections which do nothing cannot stop the board for everybody.

uvicorn waits for the head and the body of a request for ever, and stops accepting when the process
has no file left for a connection. Here each has its time, and where there are too many connections
one of the address that has most makes room.
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

HEAD_SECONDS = 10.0  # to send the head of a request
BODY_SECONDS = 30.0  # to send its body; the largest is 1 MB
READ_SECONDS = 30.0  # to take what has been sent so far
CLOSE_SECONDS = 10.0  # to take the rest of the last answer
SHUTDOWN_SECONDS = 5  # somebody may be watching a long answer
MAX_CONNECTIONS = 2000
WANTED_FILES = 4096
# asyncio accepts so many in one turn of its loop. Were there as many as the limit, a connection
# could have to make room before its request is looked at.
ACCEPTED_AT_ONCE = 16
# A thread that computes, as one that renders a long table, gives way to others so often. With
# Python's 5 ms a request, which changes threads dozens of times, would take half a second.
SWITCH_SECONDS = 0.001
BACKLOG = 1024  # those that wait in the kernel until they are accepted


class State(NamedTuple):
    """What a connection waits for, in which request; a limit of None is for ever."""

    limit_seconds: float | None
    request: object


class Connections:
    """The connections of a server.

    Args:
        max_connections: how many there may be.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        # Of each address the connection that was used longest ago is the first.
        self._open: dict[str, dict[LimitedProtocol, None]] = {}
        self._num_open = 0

    def add(self, connection: "LimitedProtocol") -> None:
        """Take a new connection in.

        Where there are too many, one of the address that has most makes room: the one that has
        waited longest for its client, or this one where all of them are being answered.
        """
        self._open.setdefault(connection.address(), {})[connection] = None
        self._num_open += 1
        if self._num_open > self.max_connections:
            crowd = max(self._open.values(), key=len)
            waiting = (one for one in crowd if one.state().limit_seconds is not None)
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
        """Close connections whose client has been in one state for too long; call it often."""
        for connection in [one for crowd in self._open.values() for one in crowd]:
            state, since = connection.state(), connection.since
            if since is None or since[0] != state:
                connection.since = state, now
            elif state.limit_seconds is not None and now - since[1] >= state.limit_seconds:
                self._abort(connection)

    def _abort(self, connection: "LimitedProtocol") -> None:
        self.discard(connection)
        connection.transport.abort()


class LimitedConfig(uvicorn.Config):
    """A configuration of uvicorn with a limit of connections."""

    def __init__(self, app: ASGIApp, *, max_connections: int, **settings: Any) -> None:
        # Not httptools, where it is installed: it takes heads of any size.
        super().__init__(app, http=LimitedProtocol, ws="none", backlog=ACCEPTED_AT_ONCE, **settings)
        self.limited = Connections(max_connections)


class LimitedProtocol(H11Protocol):
    """One connection."""

    config: LimitedConfig
    since: tuple[State, float] | None = None

    def address(self) -> str:
        """Where the client is; empty where that is not known."""
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
        """Count it no more."""
        self.config.limited.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note that the connection is of use."""
        self.config.limited.touch(self)
        super().on_response_complete()


class LimitedServer(uvicorn.Server):
    """A server that closes connections whose time is up."""

    config: LimitedConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                with listening.dup() as same:
                    same.listen(BACKLOG)  # asyncio has one number for this and for one turn

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            self.config.limited.abort_late(time.monotonic())
        return await super().on_tick(counter)


class OncePerSecond(logging.Filter):
    """Lets one message a second through of every logger and level, with the number left out."""

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


def serve_app(app: ASGIApp, host: str, port: int) -> None:
    """Serve an application until it is interrupted."""
    sys.setswitchinterval(SWITCH_SECONDS)
    server = LimitedServer(configure(app, host, port))
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(OncePerSecond())
    with suppress(KeyboardInterrupt):
        server.run()


def configure(app: ASGIApp, host: str, port: int) -> LimitedConfig:
    """The settings of a server, for which this process may open more files.

    `X-Forwarded-For` is believed from the addresses in FORWARDED_ALLOW_IPS alone: where it is not
    set, from nobody, or programs on this machine and clients of a proxy that passes the header on
    could call themselves what they like.
    """
    return LimitedConfig(
        app,
        max_connections=min(MAX_CONNECTIONS, raise_file_limit() // 2),  # the rest: the database
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", ""),
    )


def raise_file_limit() -> int:
    """Allow this process more open files, where it may have them. Returns how many it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
