"""kill -9 while ten people submit: what was acknowledged is there, and the file is whole."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labeling_app.db.store import Store

LABELLER = """
import asyncio
import sys
from pathlib import Path
from labeling_app.web.batching import RequestBatcher
from labeling_app.db.queue import TaskQueue
from labeling_app.web.board.session import BoardRequest, Board
from labeling_app.db.store import Store

store = Store(Path(sys.argv[1]))
queue = TaskQueue(store)
people = [f"person {number}" for number in range(10)]
for name in people:
    queue.add_annotator(name)
batcher = RequestBatcher(Board(store, queue).answer_all)

async def label(name):
    screen = await batcher.answer(BoardRequest(name, {"op": "next"}))
    while screen["task"]:
        task = screen["task"]["ticket"]
        submit = {"op": "submit", "id": f"u{task}", "ticket": task, "tiers": [[0], [1]]}
        screen = await batcher.answer(BoardRequest(name, submit))
        print(f"u{task}", flush=True)

async def label_all():
    await asyncio.gather(*map(label, people))

print("ready", flush=True)
asyncio.run(label_all())
"""


def label_until_killed(db: Path, seconds: float, *, after_one: bool) -> list[str]:
    """Submit in a process of its own, kill it, and return what was confirmed as stored.

    The seconds begin with the first submission or, with `after_one`, with its confirmation.
    """
    command = [sys.executable, "-c", LABELLER, str(db)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        confirmed = [process.stdout.readline()] if after_one else []
        time.sleep(seconds)
        process.kill()
        # The last line may have been cut by the kill; only whole lines were acknowledged.
        confirmed += process.stdout
        return [line.strip() for line in confirmed if line.endswith("\n")]


def run_rounds(store: Store, num_rounds: int) -> None:
    chance = random.Random(0)
    acknowledged: set[str] = set()
    for number in range(num_rounds):
        path, seconds = store.connections.path, chance.uniform(0, 0.2)
        acknowledged |= set(label_until_killed(path, seconds, after_one=number % 2 == 1))
        db = store.connections.db
        stored = {row[0] for row in db.execute("SELECT id FROM rankings")}
        assert acknowledged <= stored
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert acknowledged  # it did submit


def test_two_rounds_of_kill_lose_nothing(store, fill):
    fill(2_000, 2)
    run_rounds(store, 2)


@pytest.mark.slow
def test_a_hundred_rounds_of_kill_lose_nothing(store, fill):
    fill(20_000, 2)
    run_rounds(store, 100)
