"""kill -9 of server, loop and stage at random moments, while people rank and a lead presses Start.

What was acknowledged is there, no two stages ever run at once, and the rounds go on.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from labeling_app.annotators.users import Users
from labeling_app.db.store import Store
from labeling_app.web.access.cookies import make_cookie
from labeling_app.web.access.sign_in import COOKIE
from rlhf.cli import main
from rlhf.run.loops.promotion import evaluated_rounds, read_promotions
from rlhf.run.metrics import read_metrics
from tests.browser.conftest import ProcessApp
from tests.pipeline.loop import read_json, write_prompts

KILLS = 30
LONGEST_PAUSE = 14.0  # between two kills
SECONDS = 600.0
STEPS = 6
PEOPLE = {"lea": "lead", "ann": "annotator", "bob": "annotator"}
STAGES = ("import", "generate", "round", "export", "train-reward", "reference", "ppo", "evaluate")
FILE = """\
out: {out}
model: {model}
new_rankings: 4
rounds: 100
stop_without_gain: false
stages:
  generate: {{k: 2, max_new_tokens: 12, precision: fp32}}
  round: {{precision: fp32}}
  train-reward: {{precision: fp32}}
  reference: {{sampling: {{samples: 2, max_new_tokens: 12}}, precision: fp32}}
  ppo: {{steps: {steps}, save_every: 1, batch: {{episodes_per_step: 4}}, precision: fp32}}
  evaluate: {{precision: fp32, samples: 2}}
"""


class Team:
    """The server, and people who use it until they are told to stop."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.out = folder / "out"
        self.db = self.out / "labels.db"
        self.out.mkdir()
        prompts = write_prompts(folder / "prompts.jsonl")
        assert main(["import", str(prompts), "--db", str(self.db)]) == 0
        with Store(self.db) as store:
            users = Users(store)
            for name, role in PEOPLE.items():
                users.add(name, role, "long enough")
            self.cookies = {
                name: f"{COOKIE}={make_cookie(store.secret, name, users.get(name).epoch)}"
                for name in PEOPLE
            }
        file = folder / "loop.yaml"
        text = FILE.format(out=self.out, model=model, steps=STEPS)
        file.write_text(text, encoding="utf-8")
        self.rankings: list[str] = []  # acknowledged
        self.promotions: list[int] = []
        self.overlaps: list[list[str]] = []
        self.problems: list[str] = []
        self.is_over = threading.Event()
        self.app = ProcessApp(self.db, "--loop", str(file))
        tasks = (self.watch, self.lead, *(lambda n=n: self.rank(n) for n in ("ann", "bob")))
        self.threads = [threading.Thread(target=self.until_over, args=(one,)) for one in tasks]
        for thread in self.threads:
            thread.start()

    def until_over(self, work: Callable[[], None]) -> None:
        while not self.is_over.is_set():
            try:
                work()
            except (URLError, HTTPException, ConnectionError, TimeoutError):
                time.sleep(0.2)  # the server is dead, perhaps in the middle of an answer: try again
            except Exception as error:
                self.problems.append(repr(error))
                raise

    def ask(self, name: str, path: str, payload: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.app.url + path,
            data=None if payload is None else json.dumps(payload).encode(),
            headers={"cookie": self.cookies[name], "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read().decode()
        return body if payload is None else json.loads(body)

    def rank(self, name: str) -> None:
        task = self.ask(name, "board", {"op": "next"}).get("task")
        if task is None:
            time.sleep(0.5)
            return
        tiers = [[0], [1]] if random.random() < 0.5 else [[1], [0]]
        number = f"{name}-{task['id']}"
        submit = {"op": "submit", "id": number, "ticket": task["ticket"], "tiers": tiers}
        if self.ask(name, "board", submit)["ok"]:
            self.rankings.append(number)
        time.sleep(random.uniform(0, 1))

    def lead(self) -> None:
        if 'data-op="start"' in self.ask("lea", "lead/runs/state"):
            self.ask("lea", "lead/runs", {"op": "start"})
            self.ask("lea", "lead/runs", {"op": "start"})
        done = evaluated_rounds(self.out)
        if done and done[-1] not in self.promotions:
            answer = self.ask("lea", "lead/runs", {"op": "promote", "round": done[-1]})
            self.promotions += [] if "error" in answer else [done[-1]]
        time.sleep(0.5)

    def watch(self) -> None:
        running = self.processes(*STAGES)
        if len(running) > 1:
            self.overlaps.append(list(running.values()))
        time.sleep(0.05)

    def processes(self, *commands: str) -> dict[int, str]:
        """The processes of these commands that work for this loop.

        What such a process starts looks like it until the new program runs, and is left out.
        """
        found, parents = {}, {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                words = (entry / "cmdline").read_text(encoding="utf-8").split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, UnicodeDecodeError):
                continue
            is_ours = "rlhf.cli" in words and any(str(self.out.parent) in one for one in words)
            if is_ours and words[words.index("rlhf.cli") + 1] in commands:
                found[int(entry.name)] = words[words.index("rlhf.cli") + 1]
                parents[int(entry.name)] = parent
        return {number: name for number, name in found.items() if parents[number] not in found}

    def kill(self, victim: str) -> str | None:
        """Kill one process; what it was, or None if none of this kind runs."""
        if victim == "server":
            self.app.process.kill()
            self.app.process.communicate()
            time.sleep(random.uniform(0, 2))
            self.app.start()
            return victim
        found = self.processes(*(STAGES if victim == "stage" else ("loop",)))
        if not found:
            return None
        number, name = random.choice(sorted(found.items()))
        os.kill(number, signal.SIGKILL)
        return name

    def end(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(120)
        self.app.stop()
        for number in {**self.processes("loop"), **self.processes(*STAGES)}:
            os.kill(number, signal.SIGKILL)


def kill_at_random(team: Team, count: int, longest_pause: float) -> list[str]:
    killed: list[str] = []
    while len(killed) < count:
        time.sleep(random.uniform(0, longest_pause))
        name = team.kill(random.choice(("server", "loop", "stage", "stage")))
        killed += [name] if name else []
    return killed


@pytest.mark.slow
def test_rounds_go_on_whatever_is_killed(tmp_path: Path, tiny_model: Path) -> None:
    random.seed(0)
    team = Team(tmp_path, tiny_model)
    try:
        killed = kill_at_random(team, KILLS, LONGEST_PAUSE)
        wanted = len(evaluated_rounds(team.out)) + 1
        limit = time.monotonic() + SECONDS
        while len(evaluated_rounds(team.out)) < wanted:
            assert time.monotonic() < limit, team.ask("lea", "lead/runs/state")
            time.sleep(0.5)
        wait = time.monotonic() + 60
        while wanted - 1 not in team.promotions and time.monotonic() < wait:
            time.sleep(0.1)
    finally:
        team.end()
    sys.stdout.write(f"killed {killed}; {wanted} rounds, {len(team.rankings)} rankings\n")
    assert team.problems == []
    assert team.overlaps == []
    assert len(killed) == KILLS
    with Store(team.db) as store:
        db = store.connections.db
        stored = {row[0] for row in db.execute("SELECT id FROM rankings")}
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert len(team.rankings) >= 4 * wanted
    assert set(team.rankings) <= stored
    history = [one.round for one in read_promotions(team.out)]
    assert [number for number in history if number in team.promotions] == team.promotions
    entries = read_json(team.out / "commands.json")["commands"]
    for number in range(wanted):
        rows = read_metrics(team.out / f"round-{number}" / "ppo" / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        order = list(dict.fromkeys(one["stage"] for one in entries if one["round"] == number))
        assert order == ["round" if number else "generate", *STAGES[3:]]
