"""Takes pictures of the app for labeling.md and its README: small databases, headless Chromium.

SmolLM2 answers some prompts of the quickstart, and three simulated people rank the answers by how
positive they sound, each with noise of their own. The pictures of the app's README show one task
and a conversation with written answers, and people who sign in. The rounds are those of a loop that
has run.

    PYTHONPATH=. python examples/guides/take_pictures.py [--db D] [--loop FILE]

`--db` shows a database that is there instead. Without `--loop`, the page Runs is left out.
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

import yaml
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from examples.quickstart.sentiment import score
from labeling_app.annotators.invitations import Invitations
from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.people.sources import find_sources, give_source
from labeling_app.db.queue import Submission, Task, TaskQueue
from labeling_app.db.store import Store
from tests.servers.chat import ChatServer

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
PEOPLE = {"ann": 0.2, "bob": 0.5, "eve": 1.0}  # standard deviation of the noise
PROMPTS, TASKS_EACH = 60, 36
ACCOUNTS = {"ann": "annotator", "bob": "annotator", "lea": "admin", "max": "lead"}
PASSWORD = "long enough"
WIDTH, HEIGHT, COLORS = 1100, 860, 64
PHONE = {"width": 390, "height": 844}
GUIDES, README = Path("examples/guides/pictures"), Path("labeling_app/pictures")
RUBRIC = "Put first the answer that **a friend would be glad to get**. Length doesn't matter.\n"

SKY = "Explain to a ten-year-old why the sky is blue."
ANSWERS = (
    "Sunlight holds all the colors of the rainbow. When it hits the tiny bits of air, **blue light "
    "bounces around** much more than red light, so blue comes to your eyes from every side of the "
    "sky.",
    "Rayleigh scattering: air molecules scatter light by `1/λ⁴`, so\n\n* **blue** (450 nm) is "
    "scattered about 4.4 times as much as **red** (650 nm)\n* at sunset the light crosses more "
    "air, and the red is what is left.",
    "Great question! I'd be happy to help. The sky is blue for many fascinating reasons that "
    "scientists have studied for many years. In short: light scatters.",
    "The sky is blue because it reflects the ocean.",
)
STRENGTHS = ("Slightly", "Clearly", "Tie")  # between the answers, from the top
OPINIONS = {  # places of the answers, best first, and a note
    "ann": (((0,), (1,), (2,), (3,)), "The first is right, and a child can follow it."),
    "bob": (((0,), (2,), (1,), (3,)), "Nobody of ten knows nanometers."),
    "eve": (((1,), (0,), (2, 3)), ""),
}
TALK = (  # a question, and the answers to choose from
    (
        "I have three days in Porto in May. What should I not miss?",
        "Three days is enough for **Porto** if you keep the center for the mornings:\n\n"
        "1. *Ribeira* and the cathedral, then the lower deck of the Luís I bridge.\n"
        "2. Livraria Lello before ten, Clérigos tower, an afternoon in Serralves.\n"
        "3. A port lodge in Gaia, and the tram along the river to Foz.",
        "Porto has many sights. Walk around and see what you like.",
    ),
    (
        "How do I get to the beach from there?",
        "The **tram 1** follows the river from Infante to Passeio Alegre in about 25 minutes.\n\n"
        "The faster way is bus 500: same view, from Praça da Liberdade.",
        "You can take the tram. It is a nice ride along the river, and the beach is at the end of "
        "the line.",
    ),
)
ROUND = (
    {"prompt": "How do I boil an egg?", "responses": ["Boil it eight minutes.", "You cannot."]},
    {"prompt": "Name three rivers.", "responses": ["Rhine, Nile, Amazon.", "I would rather not."]},
    {"prompt": "What is 2 + 2?", "responses": ["4", "5"]},
)


def run(*arguments: str) -> None:
    """A command of rlhf."""
    subprocess.run([sys.executable, "-m", "rlhf.cli", *arguments], cwd=REPOSITORY, check=True)


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
        users.set_team("ann", "editors")
        [first, *_] = find_sources(store.connections)
        give_source(store.connections, first, ["bob"], ["editors"])


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
    """Somebody's ranking of a task."""
    scores = [score("", text) + chance.gauss(0, noise) for text in task.texts]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    seconds = chance.uniform(12, 40)
    tiers = tuple((index,) for index in order)
    return Submission(id=id_, task_id=task.id, tiers=tiers, duration_ms=int(1000 * seconds))


@contextmanager
def serving(db: Path, *arguments: str) -> Iterator[str]:
    """The address of the app."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["label", "--db", str(db), "--port", port, *arguments]
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
    """A picture of the page down to some height."""
    page.set_viewport_size({"width": WIDTH, "height": 500})  # or the body is as high as the window
    height = page.evaluate("document.querySelector('body').scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": min(height, most_pixels)})
    shoot(page, path)


def shoot(page: Page, path: Path) -> None:
    """A picture of what the window shows, in few colors, which is small."""
    page.wait_for_timeout(500)
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(json.dumps({"picture": str(path), "bytes": path.stat().st_size}))


def fill_sky(db: Path) -> None:
    """One task with written answers."""
    line = {"prompt": SKY, "responses": list(ANSWERS)}
    source = db.with_suffix(".jsonl")
    source.write_text(json.dumps(line), encoding="utf-8")
    run("import", str(source), "--db", str(db))


def take_board(browser: Browser, db: Path, rubric: Path) -> None:
    """The board with an order that somebody has made: at a desk, in the dark, on a phone."""
    fill_sky(db)
    looks = {
        "../board": {"viewport": {"width": WIDTH, "height": HEIGHT}},
        "dark": {"viewport": {"width": WIDTH, "height": HEIGHT}, "color_scheme": "dark"},
        "phone": {"viewport": PHONE, "device_scale_factor": 2, "is_mobile": True},
    }
    with serving(db, "--annotator", "ann", "--rubric", str(rubric)) as url:
        for name, look in looks.items():
            page = browser.new_page(**look)
            for _ in range(2):  # a new rubric is open at the first visit
                page.goto(url)
                page.wait_for_selector(".rb-list .rb-card")
            if name == "../board":
                put_in_order(page)
            shoot(page, README / f"{name}.png")
            page.close()


def put_in_order(page: Page) -> None:
    """Rank the answers by keyboard, and say how much better each is."""
    for rank, text in enumerate(ANSWERS, start=1):
        page.locator(f".rb-list .rb-card:has-text({json.dumps(text[:23])})").focus()
        page.keyboard.press(str(rank))
    for position, label in enumerate(STRENGTHS, start=1):
        page.locator(".rb-list .rb-item").nth(position).locator(
            f"button:has-text('{label}')"
        ).click()
    page.locator(".rb-list .rb-card").nth(2).focus()
    page.wait_for_selector(".rb-saved:has-text('Draft saved')")


def take_decision(page: Page, db: Path) -> None:
    """A task on which three people differ, as the lead sees it who decides."""
    fill_sky(db)
    with Store(db) as store:
        set_overlap(store.connections, len(OPINIONS))
        queue = TaskQueue(store)
        for name, (order, note) in OPINIONS.items():
            queue.add_annotator(name)
            task = queue.next_task(name)
            assert task is not None
            tiers = tuple(
                tuple(task.texts.index(ANSWERS[index]) for index in tier) for tier in order
            )
            queue.submit(name, Submission(id=name, task_id=task.id, tiers=tiers, note=note))
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    with serving(db, "--annotator", "lea") as url:
        page.goto(url + "lead/quality")
        page.click(".task a:has-text('decide')")
        page.wait_for_selector(".rb-opinions li")
        shoot(page, README / "decision.png")


def take_live(page: Page, db: Path) -> None:
    """A conversation in live mode, the better answer chosen twice."""
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    with (
        ChatServer() as chat,
        serving(db, "--annotator", "ana", "--endpoint", chat.url) as url,
    ):
        page.goto(url + "live")
        for question, *chat.answers in TALK:
            page.fill("#prompt", question)
            page.press("#prompt", "Enter")
            page.wait_for_selector(".saved:has-text('The answers are complete')")
            better = page.locator(".card").filter(has_text=chat.answers[0][-20:])
            better.locator("[data-act=up]").click()
            page.click(f".pick[aria-label='{better.locator('.letter').inner_text()} is better']")
            page.wait_for_selector(".card.best")
            page.wait_for_selector(".saved:text-is('Saved')")
        shoot(page, README / "live.png")


def take_data(page: Page, url: str, folder: Path) -> None:
    """The page Data with the preview of a file, one of whose lines is bad."""
    file = folder / "round-3.jsonl"
    lines = [{**line, "tiers": [[0], [1]]} for line in ROUND]
    file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": 3}])), encoding="utf-8")
    page.goto(url + "lead/data")
    page.set_input_files("#file", file)
    page.click("text=Preview")
    page.wait_for_selector(".preview:visible")
    take(page, README / "data.png", 1800)


def take_runs(page: Page, file: Path) -> None:
    """The page Runs of a loop, which is in `out` of its settings."""
    db = Path(yaml.safe_load(file.read_text(encoding="utf-8"))["out"]) / "labels.db"
    with serving(db, "--annotator", "lea", "--loop", str(file)) as url:
        page.goto(url + "lead/runs")
        page.wait_for_selector(".round")
        take(page, GUIDES / "runs.png", 1800)


def take_people(page: Page, db: Path) -> None:
    """The page People, as an admin sees it, with one source open."""
    fill_people(db)
    with serving(db) as url:
        page.goto(url + "sign-in")
        page.fill("#name", "lea")
        page.fill("#password", PASSWORD)
        page.click("button[type=submit]")
        page.goto(url + "lead/people")
        page.click("details summary")
        take(page, README / "people.png", 1600)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--db", type=Path, help="a database that is there")
    parser.add_argument("--loop", type=Path, help="settings of a loop that has run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        db, rubric = arguments.db or folder / "labels.db", folder / "rubric.md"
        if not arguments.db:
            fill(db, arguments.model)
        rubric.write_text(RUBRIC, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 500})
        page.set_default_timeout(300_000)
        with serving(db, "--annotator", "dan", "--rubric", str(rubric)) as url:
            page.goto(url)
            page.wait_for_selector(".rb-list .rb-card")
            take(page, GUIDES / "board.png", 1000)
            page.goto(url + "lead/quality")
            page.wait_for_selector(".numbers")
            take(page, GUIDES / "quality.png", 1800)
            take_data(page, url, folder)
            page.goto(url + "lead/rubric")
            page.wait_for_selector(".shown p")
            take(page, README / "rubric.png", 1000)
        if arguments.loop:
            take_runs(page, arguments.loop)
        take_board(browser, folder / "sky.db", rubric)
        take_decision(page, folder / "decision.db")
        take_people(page, folder / "people.db")
        take_live(page, folder / "live.db")
        browser.close()


if __name__ == "__main__":
    main()
