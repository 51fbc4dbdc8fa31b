"""A hundred people who submit rankings, in one thread: sockets and bytes, not an HTTP library.

A lead who looks at pages meanwhile has a process of its own, or the hundred would delay it. There
is a loop with evaluated rounds for the page *Runs*.

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
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

RESPONSES = 4
LEAD_PAUSE_SECONDS = 0.1
STAGES = ("export", "train-reward", "reference", "ppo", "evaluate")
OPEN_TO_LEADS = "[rounds, new_rankings, stages.ppo.steps]"
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
        tiers = [[index] for index in range(RESPONSES)]
        payload = {"op": "submit", "id": self.name, "ticket": self.task, "tiers": tiers}
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
        self.task = answer["task"]["ticket"]
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


def evaluated_loop(file: Path, out: Path, num_rounds: int) -> None:
    """Write a loop's settings file and its folder, with rounds that are done, evaluated and read.

    The folder holds what the page *Runs* reads: no models, no labels.
    """
    from rlhf.records.jsonl import write_json
    from rlhf.run.loops.promotion import promote
    from rlhf.run.rundir import RunDir

    text = f"out: {out}\nmodel: m\nrounds: {num_rounds}\nlead_may: {OPEN_TO_LEADS}\n"
    file.write_text(text, encoding="utf-8")
    loop = RunDir(out)
    commands: list[dict[str, Any]] = []
    results, log = [], []
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(num_rounds):
        for name in ("round" if number else "generate", *STAGES):
            done = {"started_at": began.isoformat(), "seconds": 1234.5, "exit_code": 0}
            commands.append({"round": number, "stage": name, **done})
            began += timedelta(seconds=1300)
            log += [f"rlhf {name} --config {out}/round-{number}/settings/{name}.yaml"] * 10
        for folder in ("reward", "reference", "ppo", "evaluate"):
            run = RunDir(out / f"round-{number}" / folder)
            write_json(run.stage_file, {"stage": folder, "status": "done"})
            run.report_html.write_text(f"<!doctype html><h1>{folder}</h1>", encoding="utf-8")
        rate = {"value": 0.62, "low": 0.55, "high": 0.69, "level": 0.95, "n": 200, "p_value": 0.004}
        result = {"round": number, "judge": "a reward model", "outcome": "better", "accuracy": rate}
        result |= {"rankings": 1000 * (number + 1), "new_rankings": 1000}
        results.append({**result, "win_rate": {"original": rate, "before": rate}})
    write_json(loop.stage_file, {"stage": "loop", "status": "done"})
    loop.config_file.write_text(text, encoding="utf-8")
    write_json(loop.commands_file, {"commands": commands})
    stopped = f"{num_rounds} of {num_rounds} rounds are done."
    report = {"rounds": results, "stopped": stopped, "stopped_by": "rounds"}
    write_json(loop.report_json, report)
    (out / "loop.log").write_text("\n".join(log), encoding="utf-8")
    for number in range(num_rounds):
        promote(out, number, "lead")
