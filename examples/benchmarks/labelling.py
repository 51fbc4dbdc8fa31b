"""Labelling under load: submits per second and the wait for the next task, on small and big files.

A hundred annotators are threads with a signed-in HTTP connection each, against `rlhf label` as a
process of its own. A submit is one request whose answer holds the next task. Measured:

    load      no think time, 10 submits each; rankings lost or stored twice
    bare      the same write behind one route of a bare FastAPI app, same clients
    pace      12 submits a second in all
    browser   from Ctrl+Enter to the next task on the screen of a headless Chromium
    promises  tests: kill -9 while people submit, 60 requests at once, a full disk

    python examples/benchmarks/labelling.py [--quick] [--json] [--prompts N] [--big N]

`--big` prompts, with four responses each, make the database on which load and pace run once more.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labeling_app.store import Store

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
ANNOTATORS = 100
RESPONSES = 4
SUBMITS_EACH = 10
SUBMITS_PER_SECOND = 12
DAY_SECONDS = 86_400
TESTS = "tests/labeling_app/"
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
  const start = performance.now();
  const key = { key: 'Enter', ctrlKey: true, bubbles: true };
  document.dispatchEvent(new KeyboardEvent('keydown', key));
  look();
})"""


def build_database(path: Path, num_prompts: int, users: int = ANNOTATORS) -> None:
    """Prompts of some 60 words with responses of some 100, and users who sign in, if any."""
    from labeling_app.store import Store
    from rlhf.records import Message, Prompt, Response

    generator = random.Random(0)
    words = ["time", "people", "water", "house", "music", "light", "paper", "river", "green"]

    def text(number: int) -> str:
        return " ".join(generator.choices(words, k=number))

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
    from labeling_app.users import Users

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


@contextmanager
def serving(*command: str) -> Iterator[int]:
    """A server process on a free port, until it is not needed any more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [sys.executable, *command, "--port", str(port)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(1200):
                if server.poll() is not None:
                    raise RuntimeError(f"the server stopped with status {server.returncode}")
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


class Annotator:
    """One person at a browser: a connection that stays open, and the task on the screen."""

    def __init__(self, port: int, number: int, cookie: str, component: int) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"Content-Type": "application/json", "Cookie": f"rlhf_session={cookie}"}
        self.component = component
        self.number = number
        self.acknowledged: list[str] = []
        self.waits: list[float] = []
        self.task = self._ask({"op": "next"})["task"]
        # The server lets go of a connection that is idle for 5 s; the next request opens it again.
        self.connection.close()

    def submit(self) -> None:
        """Rank the four as they stand, and get the next task."""
        name = uuid.uuid4().hex
        tiers = [[place] for place in range(RESPONSES)]
        payload = {"op": "submit", "id": name, "task_id": self.task["id"], "tiers": tiers}
        start = time.perf_counter()
        answer = self._ask({**payload, "duration_ms": 30_000})
        self.waits.append(time.perf_counter() - start)
        self.acknowledged.append(name)
        self.task = answer["task"]

    def _ask(self, payload: dict[str, Any]) -> dict[str, Any]:
        body = {
            "data": payload,
            "component_id": self.component,
            "fn_name": "rpc",
            "session_hash": f"benchmark{self.number}",
        }
        answer = post(self.connection, "/gradio_api/component_server", body, self.headers)
        if not answer["ok"]:
            raise RuntimeError(answer["error"])
        return answer


def post(
    connection: HTTPConnection, path: str, body: dict[str, Any], headers: dict[str, str]
) -> dict[str, Any]:
    """Send JSON and read JSON."""
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {content[:300]!r}")
    found: dict[str, Any] = json.loads(content)
    return found


def sign_in_all(db: Path, port: int) -> list[Annotator]:
    """A hundred annotators, each with a task on the screen."""
    from labeling_app.auth import make_cookie
    from labeling_app.store import Store

    with Store(db) as store:
        secret = store.secret
    cookies = [
        make_cookie(secret, name_of(n), 0, time.time() + DAY_SECONDS) for n in range(ANNOTATORS)
    ]
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/config", headers={"Cookie": f"rlhf_session={cookies[0]}"})
    components = json.loads(connection.getresponse().read())["components"]
    [board] = [c["id"] for c in components if c["props"].get("elem_id") == "board"]
    return [Annotator(port, n, cookie, board) for n, cookie in enumerate(cookies)]


def all_at_once(work: list[Callable[[], None]]) -> float:
    """Seconds until every piece of work, each in a thread of its own, is done."""
    problems: list[BaseException] = []
    gate = threading.Barrier(len(work) + 1)

    def run(one: Callable[[], None]) -> None:
        gate.wait()
        try:
            one()
        except (RuntimeError, OSError, KeyError, TypeError) as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if problems:
        raise RuntimeError(f"{len(problems)} of {len(work)} failed, the first: {problems[0]!r}")
    return seconds


def measure_load(db: Path, port: int) -> dict[str, float]:
    """No think time: submits per second, the wait, and what is in the database afterwards."""
    from sqlite_utils import Database

    people = sign_in_all(db, port)

    def label(one: Annotator) -> Callable[[], None]:
        def work() -> None:
            for _ in range(SUBMITS_EACH):
                one.submit()

        return work

    seconds = all_at_once([label(one) for one in people])
    acknowledged = {name for one in people for name in one.acknowledged}
    database = Database(db)
    stored = [
        (row["id"], row["task_id"])
        for row in database.query("SELECT id, task_id FROM rankings WHERE live = 1")
    ]
    database.close()
    return {
        "submits_per_second": len(acknowledged) / seconds,
        "lost": len(acknowledged - {name for name, _ in stored}),
        "stored_twice": len(stored) - len({task for _, task in stored}),
        **percentiles([wait for one in people for wait in one.waits]),
    }


def measure_pace(db: Path, port: int, seconds: float) -> dict[str, float]:
    """Twelve submits a second in all, at random moments."""
    people = sign_in_all(db, port)
    pause = ANNOTATORS / SUBMITS_PER_SECOND
    end = time.perf_counter() + seconds

    def label(one: Annotator) -> Callable[[], None]:
        def work() -> None:
            chance = random.Random(one.number)
            time.sleep(chance.uniform(0, pause))
            while time.perf_counter() < end:
                one.submit()
                one.connection.close()
                time.sleep(chance.uniform(0.5, 1.5) * pause)

        return work

    all_at_once([label(one) for one in people])
    waits = [wait for one in people for wait in one.waits]
    return {"submits_per_second": len(waits) / seconds, **percentiles(waits)}


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    return {
        "p50_ms": 1000 * statistics.median(seconds),
        "p99_ms": 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[98],
    }


def measure_bare(db: Path) -> dict[str, float]:
    """The same clients against one route that stores a ranking and does nothing else."""
    with serving(__file__, "--bare", str(db)) as port:

        def work() -> None:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {"Content-Type": "application/json"}
            for _ in range(SUBMITS_EACH):
                post(connection, "/submit", {"id": uuid.uuid4().hex}, headers)

        seconds = all_at_once([work] * ANNOTATORS)
    return {"submits_per_second": ANNOTATORS * SUBMITS_EACH / seconds}


def serve_bare(db: Path, port: int) -> None:
    """FastAPI and the same INSERT in the same kind of transaction."""
    import uvicorn
    from fastapi import FastAPI

    from labeling_app.store import Store, insert_ranking
    from rlhf.records import Ranking

    store = Store(db)
    [prompt] = store.connections.db.query("SELECT id FROM prompts LIMIT 1")
    responses = store.responses(prompt["id"])
    tiers = tuple((response.id,) for response in responses)
    app = FastAPI()

    @app.post("/submit")
    def submit(sent: dict[str, str]) -> dict[str, bool]:
        ranking = Ranking(
            id=sent["id"], prompt_id=prompt["id"], annotator=name_of(0), kind="human", tiers=tiers
        )
        with store.connections.write() as connection:
            insert_ranking(connection, ranking)
        return {"ok": True}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def measure_browser(db: Path, submits: int) -> dict[str, float]:
    """One person, alone on the server: milliseconds from Ctrl+Enter to the next task drawn."""
    from playwright.sync_api import sync_playwright

    with serving("-m", "rlhf.cli", "label", "--db", str(db)) as port, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(".rb-list .rb-card")
        waits = []
        for _ in range(submits):
            waits.append(page.evaluate(SUBMIT_AND_LOOK))
            page.wait_for_selector(".rb:not(.rb-busy)")
        browser.close()
    return {"submits": submits, "p50_ms": statistics.median(waits), "max_ms": max(waits)}


def keep_promises(quick: bool) -> dict[str, float]:
    """Run the tests of what must never happen; 1 is kept, 0 is broken."""
    found = {}
    for test in (KILL.format("three" if quick else "a_hundred"), *PROMISES):
        command = [sys.executable, "-m", "pytest", "-q", TESTS + test]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        skipped = "skipped" in done.stdout.splitlines()[-1]
        found[test] = float(done.returncode == 0 and not skipped)
    return found


def measure_app(folder: Path, prompts: int, seconds: float) -> list[dict[str, Any]]:
    """Load and pace on a database of that many prompts."""
    db = folder / f"{prompts}.db"
    build_database(db, prompts)
    with serving("-m", "rlhf.cli", "label", "--db", str(db), "--gold-every", "0") as port:
        load = {"case": "load", "prompts": prompts, **measure_load(db, port)}
        pace = {"case": "pace", "prompts": prompts, **measure_pace(db, port, seconds)}
    return [load, pace]


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files, seconds not minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--prompts", type=int, default=2_500, help="of the small database")
    parser.add_argument("--big", type=int, default=250_000, help="of the big one; 0 leaves it out")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        serve_bare(arguments.bare, arguments.port)
        return
    quick = arguments.quick
    big = min(arguments.big, 5_000) if quick else arguments.big
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = 10.0 if quick else 60.0
        runs = measure_app(folder, arguments.prompts, seconds)
        if big:
            runs += measure_app(folder, big, seconds)
        build_database(folder / "bare.db", 100)
        runs.append({"case": "bare", **measure_bare(folder / "bare.db")})
        build_database(folder / "browser.db", 100, users=0)
        runs.append({"case": "browser", **measure_browser(folder / "browser.db", 30)})
    runs.append({"case": "promises", **keep_promises(quick)})
    for run in runs:
        print(*(f"{key}={value:.4g}" if key != "case" else value for key, value in run.items()))
    if arguments.json:
        ratio = runs[0]["submits_per_second"] / runs[-3]["submits_per_second"]
        versions = {name: version(name) for name in ("gradio", "fastapi", "uvicorn")}
        print(json.dumps({"ratio": ratio, "runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
