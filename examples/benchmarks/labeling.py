"""Labeling under load: submits per second and the wait for the next task, on small and big files.

A hundred annotators each have a signed-in connection to `rlhf label`, a process of its own. A
submit is one request whose answer holds the next task. Measured:

    load      no think time, 10 submits each; rankings lost or stored twice
    bare      the same write behind one route of a bare FastAPI app, same clients
    pace      12 submits a second in all
    leads     load without and with a lead who opens a page of the app and of a loop with eight
              rounds every 100 ms; the wait for the pages
    browser   from Ctrl+Enter to the next task on the screen of a headless Chromium
    promises  tests: kill -9 while people submit, 60 requests at once, a full disk

The clients (`crowd.py`) share the machine with the server, which people's browsers do not, and are
made to cost little: `client_cpu_ms` a submit stands beside `server_cpu_ms`.

    python examples/benchmarks/labeling.py [--quick] [--json] [--prompts N] [--big N]

`--big` prompts, with four responses each, make the database on which load and pace run once more.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crowd import RESPONSES, Annotator, drive, evaluated_loop, visiting

if TYPE_CHECKING:
    from labeling_app.db.store import Store

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
ANNOTATORS = 100
SUBMITS_EACH = 10
SUBMITS_PER_SECOND = 12
LEAD_PAIRS = 3
LEAD_SUBMITS_EACH = {"no lead": 100, "lead": 500}  # as long as a lead needs for 300 visits
LEAD_QUICK = dict.fromkeys(LEAD_SUBMITS_EACH, 30)
RANKED_BEFORE = 5_000
ROUNDS = 8
LEAD_PAGES = [f"/lead/{name}" for name in ("data", "people", "quality", "runs", "rubric")]
TESTS = "tests/labeling_app/db/"
KILL = "test_kill.py::test_{}_rounds_of_kill_lose_nothing"
PROMISES = (
    "test_queue.py::test_sixty_requests_at_once_give_exactly_two_leases_a_task",
    "test_disk_full.py",
)
# Waits for another prompt than the one on the screen, drawn.
SUBMIT_AND_LOOK = """() => new Promise(done => {
  const prompt = document.querySelector('.rb-prompt'), before = prompt.textContent;
  const look = () => prompt.textContent === before ? requestAnimationFrame(look)
    : requestAnimationFrame(() => done(performance.now() - start));
  const key = { key: 'Enter', ctrlKey: true, bubbles: true };
  document.dispatchEvent(new KeyboardEvent('keydown', key)); // nothing was moved: it asks first
  const start = performance.now();
  document.dispatchEvent(new KeyboardEvent('keydown', key));
  look();
})"""


def build_database(path: Path, num_prompts: int, users: int = ANNOTATORS) -> None:
    """Prompts of some 60 words with responses of some 100, and users who sign in, if any."""
    from labeling_app.db.store import Store
    from rlhf.records.schema import Message, Prompt, Response

    generator = random.Random(0)
    vocabulary = ["time", "people", "water", "house", "music", "light", "paper", "river", "green"]

    def text(number: int) -> str:
        return " ".join(generator.choices(vocabulary, k=number))

    with Store(path) as store:
        for start in range(0, num_prompts, 2_000):
            numbers = range(start, min(start + 2_000, num_prompts))
            chats = [(Message(role="user", content=f"{n} {text(60)}"),) for n in numbers]
            prompts = [Prompt.create(chat, "train", "benchmark") for chat in chats]
            with store.connections.write():
                store.add_prompts(prompts)
                store.add_responses(
                    Response(
                        id=f"{p.id}-{k}", prompt_id=p.id, text=text(100), model="m", sample_index=k
                    )
                    for p in prompts
                    for k in range(RESPONSES)
                )
        if users:
            add_users(store, users)


def add_users(store: "Store", number: int) -> None:
    """Annotators who sign in; one slow hash is enough for all of them."""
    from labeling_app.annotators.users import Users

    Users(store).add(name_of(0), "annotator", "long enough")
    with store.connections.write() as db:
        for name in map(name_of, range(1, number)):
            db.execute("INSERT INTO annotators VALUES (?, 'human', 0)", [name])
            db.execute(
                "INSERT INTO users (name, role, password, created_at)"
                " SELECT ?, role, password, 0 FROM users WHERE name = ?",
                [name, name_of(0)],
            )


def name_of(number: int) -> str:
    """An annotator's name."""
    return f"annotator {number}"


@dataclass(frozen=True)
class Server:
    """A server process."""

    port: int
    process: subprocess.Popen[bytes]

    def cpu_seconds(self) -> float:
        """User and system time so far, of all threads."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(*command: str) -> Iterator[Server]:
    """A server process on a free port, until it is not needed any more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = [sys.executable, *command, "--port", str(port)]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(1200):
                if process.poll() is not None:
                    raise RuntimeError(f"the server stopped with status {process.returncode}")
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield Server(port, process)
        finally:
            process.terminate()


def sign_in_all(db: Path, port: int) -> list[Annotator]:
    """A hundred annotators, each with a task on the screen."""
    from labeling_app.db.store import Store
    from labeling_app.web.access.cookies import make_cookie

    with Store(db) as store:
        secret = store.secret
    return [Annotator(port, make_cookie(secret, name_of(n), 0)) for n in range(ANNOTATORS)]


def measure_rush(
    server: Server, people: list[Annotator], submits_each: int = SUBMITS_EACH
) -> dict[str, float]:
    """No think time: submits per second, the wait, and what a submit costs the processors."""

    def think(annotator: Annotator) -> float | None:
        return 0.0 if len(annotator.waits) < submits_each else None

    server_before, client_before = server.cpu_seconds(), time.process_time()
    seconds = drive(people, think)
    waits = [wait for annotator in people for wait in annotator.waits]
    return {
        "submits_per_second": len(waits) / seconds,
        "server_cpu_ms": 1000 * (server.cpu_seconds() - server_before) / len(waits),
        "client_cpu_ms": 1000 * (time.process_time() - client_before) / len(waits),
        **percentiles(waits),
    }


def measure_load(db: Path, server: Server) -> dict[str, float]:
    """The rush at the board, and what is in the database afterwards."""
    from sqlite_utils import Database

    people = sign_in_all(db, server.port)
    rush = measure_rush(server, people)
    acknowledged = {name for annotator in people for name in annotator.acknowledged}
    database = Database(db)
    stored = [
        (row["id"], row["task_id"])
        for row in database.query("SELECT id, task_id FROM rankings WHERE live = 1")
    ]
    database.close()
    return {
        **rush,
        "lost": len(acknowledged - {name for name, _ in stored}),
        "stored_twice": len(stored) - len({task for _, task in stored}),
    }


def measure_pace(db: Path, port: int, seconds: float) -> dict[str, float]:
    """Twelve submits a second in all, at random moments."""
    people = sign_in_all(db, port)
    pause = ANNOTATORS / SUBMITS_PER_SECOND
    chance = random.Random(0)
    end = time.perf_counter() + seconds

    def think(annotator: Annotator) -> float | None:
        # The server lets go of a connection that is idle for 5 s.
        annotator.hang_up()
        lowest, highest = (0.5, 1.5) if annotator.waits else (0.0, 1.0)
        wanted = chance.uniform(lowest, highest) * pause
        return wanted if time.perf_counter() + wanted < end else None

    drive(people, think)
    waits = [wait for annotator in people for wait in annotator.waits]
    return {"submits_per_second": len(waits) / seconds, **percentiles(waits)}


def measure_leads(folder: Path, pairs: int, submits_each: dict[str, int]) -> list[dict[str, Any]]:
    """Pairs of a rush without and with a lead, on a database with 5,000 rankings and more."""
    from labeling_app.annotators.users import Users
    from labeling_app.db.store import Store
    from labeling_app.web.access.cookies import make_cookie

    db, loop = folder / "out" / "labels.db", folder / "loop.yaml"
    wanted = RANKED_BEFORE + pairs * ANNOTATORS * sum(submits_each.values())
    build_database(db, wanted // 2 + 500)  # each for two people
    with Store(db) as store:
        Users(store).add("lead", "lead", "long enough")
        cookie = make_cookie(store.secret, "lead", 0)
    evaluated_loop(loop, db.parent, ROUNDS)
    os.sync()
    command = ["label", "--db", str(db), "--loop", str(loop), "--overlap", "2"]
    runs: list[dict[str, Any]] = []
    with serving("-m", "rlhf.cli", *command) as server:

        def rush(submits: int) -> dict[str, float]:
            return measure_rush(server, sign_in_all(db, server.port), submits)

        rush(RANKED_BEFORE // ANNOTATORS)
        for _ in range(pairs):
            runs.append({"case": "no lead", **rush(submits_each["no lead"])})
            with visiting(server.port, cookie, LEAD_PAGES) as visits:
                metrics = rush(submits_each["lead"])
            pages = percentiles([seconds for _, seconds in visits])
            lead = {f"page_{name}": value for name, value in pages.items()}
            slowest = {
                f"max_ms_{page.rpartition('/')[2]}": 1000 * max(s for p, s in visits if p == page)
                for page in LEAD_PAGES
            }
            runs.append({"case": "lead", **metrics, "visits": len(visits), **lead, **slowest})
    return runs


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    return {
        "p50_ms": 1000 * statistics.median(seconds),
        "p99_ms": 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[98],
    }


def measure_bare(db: Path) -> dict[str, float]:
    """The same clients against one route that stores a ranking and does nothing else."""
    with serving(__file__, "--bare", str(db)) as server:
        return measure_rush(server, [Annotator(server.port) for _ in range(ANNOTATORS)])


def serve_bare(db: Path, port: int) -> None:
    """FastAPI and the same INSERT in the same kind of transaction."""
    import uvicorn
    from fastapi import FastAPI

    from labeling_app.db.store import Store, insert_ranking
    from rlhf.records.schema import Ranking

    store = Store(db)
    [prompt] = store.connections.db.query("SELECT id FROM prompts LIMIT 1")
    responses = store.responses(prompt["id"])
    tiers = tuple((response.id,) for response in responses)
    app = FastAPI()

    @app.post("/board")
    def submit(sent: dict[str, Any]) -> dict[str, Any]:
        name = sent.get("id", uuid.uuid4().hex)
        ranking = Ranking(
            id=name, prompt_id=prompt["id"], annotator=name_of(0), kind="human", tiers=tiers
        )
        with store.connections.write() as connection:
            insert_ranking(connection, ranking)
        return {"ok": True, "task": {"id": 0}}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def measure_browser(db: Path, submits: int) -> dict[str, float]:
    """One person, alone on the server: milliseconds from Ctrl+Enter to the next task drawn."""
    from playwright.sync_api import sync_playwright

    with serving("-m", "rlhf.cli", "label", "--db", str(db)) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector(".rb-list .rb-card")
        waits = []
        for _ in range(submits):
            waits.append(page.evaluate(SUBMIT_AND_LOOK))
            page.wait_for_selector(".rb:not(.rb-busy)")
        browser.close()
    return {"submits": submits, "p50_ms": statistics.median(waits), "max_ms": max(waits)}


def keep_promises(quick: bool) -> dict[str, float]:
    """Run the tests of what must never happen; 1 is kept, 0 is broken."""
    results = {}
    for test in (KILL.format("two" if quick else "a_hundred"), *PROMISES):
        command = [sys.executable, "-m", "pytest", "-q", TESTS + test]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        skipped = "skipped" in done.stdout.splitlines()[-1]
        results[test] = float(done.returncode == 0 and not skipped)
    return results


def measure_app(folder: Path, prompts: int, seconds: float) -> list[dict[str, Any]]:
    """Load and pace on a database of that many prompts."""
    db = folder / f"{prompts}.db"
    build_database(db, prompts)
    os.sync()  # or the first commits wait until all of it is on the disk
    with serving("-m", "rlhf.cli", "label", "--db", str(db), "--gold-every", "0") as server:
        load = {"case": "load", "prompts": prompts, **measure_load(db, server)}
        pace = {"case": "pace", "prompts": prompts, **measure_pace(db, server.port, seconds)}
    return [load, pace]


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files, seconds not minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--prompts", type=int, default=2_500, help="of the small database")
    parser.add_argument("--big", type=int, default=250_000, help="of the big one; 0 leaves it out")
    parser.add_argument("--only-leads", action="store_true", help="the case leads alone")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        serve_bare(arguments.bare, arguments.port)
        return
    with tempfile.TemporaryDirectory() as name:
        size = (1, LEAD_QUICK) if arguments.quick else (LEAD_PAIRS, LEAD_SUBMITS_EACH)
        leads = partial(measure_leads, Path(name), *size)
        runs = leads() if arguments.only_leads else measure_all(Path(name), arguments, leads)
    for run in runs:
        print(*(f"{key}={value:.4g}" if key != "case" else value for key, value in run.items()))
    if arguments.json:
        rates = {
            run["case"]: run["submits_per_second"]
            for run in reversed(runs)
            if "server_cpu_ms" in run
        }
        first, second = ("lead", "no lead") if arguments.only_leads else ("load", "bare")
        versions = {name: version(name) for name in ("gradio", "fastapi", "uvicorn")}
        ratio = rates[first] / rates[second]
        print(json.dumps({"ratio": ratio, "runs": runs, "versions": versions}))


def measure_all(
    folder: Path, arguments: argparse.Namespace, leads: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Every case."""
    quick: bool = arguments.quick
    big = min(arguments.big, 5_000) if quick else arguments.big
    seconds = 10.0 if quick else 60.0
    runs = measure_app(folder, arguments.prompts, seconds)
    if big:
        runs += measure_app(folder, big, seconds)
    runs += leads()
    build_database(folder / "bare.db", 100)
    runs.append({"case": "bare", **measure_bare(folder / "bare.db")})
    build_database(folder / "browser.db", 100, users=0)
    runs.append({"case": "browser", **measure_browser(folder / "browser.db", 30)})
    return [*runs, {"case": "promises", **keep_promises(quick)}]


if __name__ == "__main__":
    main()
