"""kill -9 while apps ask and people judge: what they saw acknowledged is in the database."""

import json
import random
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest

from labeling_app.db.answers.served import find_served
from labeling_app.db.store import Store
from tests.servers.chat import ChatServer
from tests.servers.served_policy import PolicyServer, served_policy

APPS = 8


class Apps(threading.Thread):
    """One app after the other: a streamed response, then a thumb on it, until the server dies."""

    def __init__(self, server: PolicyServer, number: int) -> None:
        super().__init__()
        self.server, self.number = server, number
        self.ended: dict[str, str] = {}  # id and text of responses whose end was seen
        self.thumbs: dict[str, str] = {}  # acknowledged

    def run(self) -> None:
        place = 0
        with httpx.Client(base_url=self.server.url, timeout=30) as client:
            while True:
                place += 1
                try:
                    served_id = self.ask(client, f"Question {place} of app {self.number}?")
                    thumb = {"id": served_id, "thumbs": "up" if place % 2 else "down"}
                    assert client.post("/feedback", json=thumb).status_code == 201
                except httpx.TransportError:
                    return
                self.thumbs[served_id] = f"thumbs-{thumb['thumbs']}"

    def ask(self, client: httpx.Client, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": "policy", "messages": messages, "stream": True}
        said, served_id = "", ""
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.ended[served_id] = said
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    served_id = event["id"]
                    said += event["choices"][0]["delta"].get("content") or ""
        return served_id


def run_until_killed(upstream: ChatServer, db: Path, seconds: float) -> list[Apps]:
    with served_policy("--endpoint", upstream.url, "--db", db) as server:
        apps = [Apps(server, number) for number in range(APPS)]
        for one in apps:
            one.start()
        time.sleep(seconds)
        while not any(one.thumbs for one in apps):  # on a busy machine
            time.sleep(0.1)
        server.process.kill()
        for one in apps:
            one.join()
    return apps


def kill_and_look(db: Path, rounds: int) -> None:
    chance = random.Random(3)
    ended: dict[str, str] = {}
    thumbs: dict[str, str] = {}
    with ChatServer() as upstream:
        for _ in range(rounds):
            for one in run_until_killed(upstream, db, chance.uniform(0.5, 2)):
                ended |= one.ended
                thumbs |= one.thumbs
            with Store(db) as store:
                for served_id, text in ended.items():
                    found = find_served(store.connections.db, served_id)
                    assert found is not None
                    assert found.response.text == text
                stored = {
                    ranking.tiers[0][0]: ranking.flags[0]
                    for record in store.ranked_prompts()
                    for ranking in record.rankings
                }
                for served_id, flag in thumbs.items():
                    found = find_served(store.connections.db, served_id)
                    assert stored[found.response.id] == flag
    with sqlite3.connect(db) as opened:
        assert opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    opened.close()
    assert len(ended) >= len(thumbs) > 0


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_and_look(tmp_path / "labels.db", 1)


@pytest.mark.slow
def test_thirty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_and_look(tmp_path / "labels.db", 30)
