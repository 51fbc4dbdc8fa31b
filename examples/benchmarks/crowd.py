"""A hundred people who submit rankings, in one thread: sockets and bytes, not an HTTP library.

A lead who looks at pages meanwhile has a process of its own, or the hundred would delay it.

People's browsers do not compute on the server, so what plays them must leave it its processors.
"""

import http.client
import json
import multiprocessing
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from selectors import EVENT_READ, DefaultSelector
from typing import Any

RESPONSES = 4
LEAD_PAUSE_SECONDS = 0.1
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


class Annotator:
    """One person at a browser: a connection that stays open, and the task on the screen."""

    def __init__(self, port: int, cookie: str = "") -> None:
        self.address = ("127.0.0.1", port)
        self.head = (
            f"POST /board HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Cookie: rlhf_session={cookie}\r\nContent-Length: "
        )
        self.socket: socket.socket | None = None
        self.acknowledged: list[str] = []
        self.waits: list[float] = []
        self._send({"op": "next"})
        while not self._is_answered():
            pass

    def submit(self, at: float) -> None:
        """Rank the four as they stand; the wait counts from `at`, when it was due."""
        self.due, self.name = at, uuid.uuid4().hex
        tiers = [[place] for place in range(RESPONSES)]
        payload = {"op": "submit", "id": self.name, "task_id": self.task, "tiers": tiers}
        self._send({**payload, "duration_ms": 30_000})

    def hear(self) -> bool:
        """Read what has come; True when the answer is complete."""
        if not self._is_answered():
            return False
        self.waits.append(time.perf_counter() - self.due)
        self.acknowledged.append(self.name)
        return True

    def connection(self) -> socket.socket:
        """The open connection."""
        if self.socket is None:
            self.socket = socket.create_connection(self.address)
        return self.socket

    def hang_up(self) -> None:
        """Close the connection; the next submit opens it again."""
        self.connection().close()
        self.socket = None

    def _send(self, payload: dict[str, Any]) -> None:
        body = json.dumps(payload)
        self.received = b""
        self.connection().sendall(f"{self.head}{len(body)}\r\n\r\n{body}".encode())

    def _is_answered(self) -> bool:
        chunk = self.connection().recv(1 << 16)
        self.received += chunk
        head, _, body = self.received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if chunk and (not length or len(body) < int(length[1])):
            return False
        answer = json.loads(body) if head.startswith(b"HTTP/1.1 200") else {}
        if not answer.get("ok"):
            raise RuntimeError(f"not acknowledged: {self.received[:500]!r}")
        self.task = answer["task"]["id"]
        return True


def drive(people: list[Annotator], think: Callable[[Annotator], float | None]) -> float:
    """Let everybody submit, think for so many seconds and submit again, until that is None.

    Returns the seconds that it took.
    """
    start = time.perf_counter()
    due: list[tuple[float, int]] = []
    selector = DefaultSelector()

    def let_think(number: int) -> None:
        seconds = think(people[number])
        if seconds is not None:
            heappush(due, (time.perf_counter() + seconds, number))

    for number in range(len(people)):
        let_think(number)
    while due or selector.get_map():
        while due and due[0][0] <= time.perf_counter():
            at, number = heappop(due)
            people[number].submit(at)
            selector.register(people[number].connection(), EVENT_READ, number)
        wait = max(0.0, due[0][0] - time.perf_counter()) if due else None
        for key, _ in selector.select(wait):
            if people[key.data].hear():
                selector.unregister(key.fileobj)
                let_think(key.data)
    return time.perf_counter() - start


@contextmanager
def visiting(port: int, cookie: str, paths: list[str]) -> Iterator[list[tuple[str, float]]]:
    """Let a lead open these pages in turn; gives, at the end, (path, seconds) of each visit."""
    visits: list[tuple[str, float]] = []
    receiver, sender = multiprocessing.Pipe()
    lead = multiprocessing.get_context("spawn").Process(
        target=_visit, args=(sender, port, cookie, paths)
    )
    lead.start()
    receiver.recv()  # each page was opened once
    try:
        yield visits
    finally:
        receiver.send("stop")
        visits += receiver.recv()
        lead.join()


def _visit(pipe: Any, port: int, cookie: str, paths: list[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def visit(path: str) -> tuple[str, float]:
        began = time.perf_counter()
        connection.request("GET", path, headers={"Cookie": f"rlhf_session={cookie}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return path, time.perf_counter() - began

    for path in paths:
        visit(path)
    pipe.send("ready")
    visits = []
    while not pipe.poll(LEAD_PAUSE_SECONDS):
        visits.append(visit(paths[len(visits) % len(paths)]))
    pipe.send(visits)
