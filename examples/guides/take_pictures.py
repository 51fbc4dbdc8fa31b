"""Takes pictures of the app for labeling.md and its README: small databases, headless Chromium.

SmolLM2 answers some prompts of the quickstart, and three simulated people rank the answers by how
positive they sound, each with noise of their own. The rounds are those of a loop that has run.

    PYTHONPATH=. python examples/guides/take_pictures.py [--out FOLDER] [--db D] [--loop FILE]

`--db` shows a database that is there instead. Without `--loop`, the page Runs is left out. The page
People is that of a second database, in which people sign in; its picture goes to --people.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from examples.quickstart.sentiment import score
from labeling_app.annotators.invitations import Invitations
from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.people.sources import give_source, sources_with_people
from labeling_app.db.queue import Submission, Task, TaskQueue
from labeling_app.db.store import Store

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
PEOPLE = {"ann": 0.2, "bob": 0.5, "eve": 1.0}  # standard deviation of the noise
PROMPTS, TASKS_EACH = 60, 36
ACCOUNTS = {"ann": "annotator", "bob": "annotator", "lea": "admin", "max": "lead"}
PASSWORD = "long enough"
WIDTH, COLORS = 1100, 64
RUBRIC = "Put first the answer that **a friend would be glad to get**. Length doesn't matter.\n"


def run(*words: str) -> None:
    """A command of rlhf."""
    subprocess.run([sys.executable, "-m", "rlhf.cli", *words], cwd=REPOSITORY, check=True)


def import_prompts(db: Path, number: int) -> None:
    """The first prompts of the quickstart, in a database."""
    lines = (REPOSITORY / "examples/quickstart/prompts.jsonl").read_text(encoding="utf-8")
    some = db.with_name("prompts.jsonl")
    some.write_text("\n".join(lines.splitlines()[:number]), encoding="utf-8")
    run("import", str(some), "--db", str(db))


def fill_people(db: Path) -> None:
    """Prompts of three sources, one of them given to two people, and accounts."""
    import_prompts(db, 3)
    with Store(db) as store:
        users = Users(store)
        for name, role in ACCOUNTS.items():
            users.add(name, role, PASSWORD)
        Invitations(users).invite("carla", "annotator")
        [first, *_] = sources_with_people(store.connections)
        give_source(store.connections, first, ["ann", "bob"])


def fill(db: Path, model: str) -> None:
    """Prompts, four responses to each, and rankings by the simulated people."""
    import_prompts(db, PROMPTS)
    settings = ["--max-new-tokens", "48", "--temperature", "0.8", "--seed", "1"]
    run("generate", "--db", str(db), "--model", model, "-k", "4", *settings)
    chance = random.Random(0)
    with Store(db) as store:
        set_overlap(store.connections, 2)
        queue = TaskQueue(store)
        for name in PEOPLE:
            queue.add_annotator(name)
        for number in range(TASKS_EACH * len(PEOPLE)):
            name = chance.choice(sorted(PEOPLE))
            task = queue.next_task(name)
            if task is not None:
                queue.submit(name, judged(task, f"{name}{number}", PEOPLE[name], chance))


def judged(task: Task, id_: str, noise: float, chance: random.Random) -> Submission:
    """What somebody says of a task."""
    found = [score("", text) + chance.gauss(0, noise) for text in task.texts]
    order = sorted(range(len(found)), key=lambda place: -found[place])
    seconds = chance.uniform(12, 40)
    tiers = tuple((place,) for place in order)
    return Submission(id=id_, task_id=task.id, tiers=tiers, duration_ms=int(1000 * seconds))


@contextmanager
def serving(db: Path, *words: str) -> Iterator[str]:
    """The address of the app."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["label", "--db", str(db), "--port", port, *words]
    with subprocess.Popen([sys.executable, "-m", "rlhf.cli", *command], cwd=REPOSITORY) as process:
        try:
            while process.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


def take(page: Page, path: Path, most_pixels: int) -> None:
    """A picture of the page down to some height, in few colors, which is small."""
    height = page.evaluate("document.querySelector('body').scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": min(height, most_pixels)})
    page.wait_for_timeout(500)
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(json.dumps({"picture": str(path), "bytes": path.stat().st_size}))


def take_people(page: Page, db: Path, path: Path) -> None:
    """The page People, as an admin sees it, with one source open."""
    fill_people(db)
    with serving(db) as url:
        page.goto(url + "sign-in")
        page.fill("#name", "lea")
        page.fill("#password", PASSWORD)
        page.click("button[type=submit]")
        page.goto(url + "lead/people")
        page.click("details summary")
        take(page, path, 1600)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples/guides/pictures"))
    parser.add_argument("--people", type=Path, default=Path("labeling_app/pictures"))
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--db", type=Path, help="a database that is there")
    parser.add_argument("--loop", type=Path, help="settings of a loop that has run, on --db")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        db, rubric = arguments.db or Path(name) / "labels.db", Path(name) / "rubric.md"
        if not arguments.db:
            fill(db, arguments.model)
        rubric.write_text(RUBRIC, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 500})
        page.set_default_timeout(300_000)
        loop = ["--loop", str(arguments.loop)] if arguments.loop else []
        with serving(db, "--annotator", "dan", "--rubric", str(rubric), *loop) as url:
            page.goto(url)
            page.wait_for_selector(".rb-list .rb-card")
            take(page, arguments.out / "board.png", 1000)
            page.goto(url + "lead/quality")
            page.wait_for_selector(".numbers")
            take(page, arguments.out / "quality.png", 1800)
            if arguments.loop:
                page.goto(url + "lead/runs")
                page.wait_for_selector(".round")
                take(page, arguments.out / "runs.png", 1400)
        page.set_viewport_size({"width": WIDTH, "height": 500})
        take_people(page, Path(name) / "people.db", arguments.people / "people.png")
        browser.close()


if __name__ == "__main__":
    main()
