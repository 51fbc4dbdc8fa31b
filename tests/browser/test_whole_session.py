"""A lead's whole session with hostile text everywhere: it is shown, nothing runs, axe agrees.

The pages hold a prompt, responses, notes, and names of people that try to run as HTML or as a
template, to break the JSON, the layout or the direction of writing.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from rlhf.records.schema import Message, Prompt, Response
from tests.browser.accessibility import require_accessible_in_both
from tests.browser.boards import RUNS
from tests.browser.conftest import App, submit_as_shown

pytestmark = pytest.mark.browser

TEMPLATE = (
    "${window.hacked = 1} {{7*7}} \\u12 `tick` \u202eright to left\u202c \N{WOMAN}\u200d\N{ROCKET}"
)
# One for each test, for an open decision waits for its lead.
LEADS = tuple(f"lea{n} {RUNS[:60]}" for n in range(3))
PEOPLE = ("<b onclick='window.hacked = 1'>ann</b>", "${window.hacked = 1}bob")
PASSWORD = "long enough"


def fill(store: Store) -> None:
    """Three tasks of hostile text, one of 100 kB; two people differ on the first."""
    for name, role in {
        **dict.fromkeys(LEADS, "lead"),
        **dict.fromkeys(PEOPLE, "annotator"),
    }.items():
        Users(store).add(name, role, PASSWORD)
    for number, text in enumerate((RUNS + TEMPLATE, TEMPLATE, "x" * 100_000 + RUNS)):
        prompt = Prompt.create((Message(role="user", content=f"{number} {text}"),), "train", "test")
        store.add_prompts([prompt])
        store.add_responses(
            Response(id=f"{number}{n}", prompt_id=prompt.id, text=answer, model=RUNS)
            for n, answer in enumerate((f"long {text}", f"short {TEMPLATE}"))
        )
    set_overlap(store.connections, 2)
    queue = TaskQueue(store)
    for name, best in zip(PEOPLE, ("long", "short"), strict=True):
        task = queue.next_task(name)
        place = next(n for n, text in enumerate(task.texts) if text.startswith(best))
        tiers = ((place,), (1 - place,))
        flags = ((place, "unsafe"),)
        queue.submit(
            name,
            Submission(
                id=name, task_id=task.id, tiers=tiers, note=RUNS + TEMPLATE, response_flags=flags
            ),
        )


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    db = tmp_path_factory.mktemp("session") / "labels.db"
    with Store(db) as store:
        fill(store)
    served = App(db)
    yield served
    served.stop()


def sign_in(page: Page, name: str) -> None:
    page.fill("#name", name)
    page.fill("#password", PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_selector(".rb-list .rb-card")


def test_every_screen_is_accessible(app, open_page):
    page = open_page(app.url)
    page.wait_for_url("**/sign-in")
    require_accessible_in_both(page, "sign-in")
    page.fill("#name", RUNS)
    page.fill("#password", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector(".problem:has-text('wrong')")
    require_accessible_in_both(page, "sign-in refused")
    sign_in(page, LEADS[0])
    require_accessible_in_both(page, "board")
    page.keyboard.press("f")
    page.keyboard.press("Enter")
    page.click("[data-act=all-bad]")
    page.locator("[data-act=leave]").first.click()
    require_accessible_in_both(page, "board with flags, all bad and one left out")
    for action, dialog in {"history": "history", "keys": "keys", "skip": "skip"}.items():
        page.click(f"[data-act={action}]")
        page.wait_for_selector(f".rb-{dialog}[open]")
        require_accessible_in_both(page, f"dialog {dialog}")
        page.keyboard.press("Escape")
    page.click(".rb-lead")
    page.click("nav a:has-text('Quality')")
    page.wait_for_selector(".task")
    require_accessible_in_both(page, "quality")
    page.click(".task a")
    page.wait_for_selector(".rb-opinions li")
    require_accessible_in_both(page, "decision")


def test_hostile_text_is_shown_everywhere_and_does_nothing(app, open_page):
    page = open_page(app.url, viewport={"width": 390, "height": 844})
    page.wait_for_url("**/sign-in")
    sign_in(page, LEADS[1])
    shown = {"board": page.inner_text(".rb-prompt")}
    page.keyboard.press("h")
    page.wait_for_selector(".rb-history[open]")
    page.keyboard.press("Escape")
    page.fill(".rb-note", RUNS + TEMPLATE)
    submit_as_shown(page)
    page.wait_for_selector(".rb-progress:has-text('1 done')")
    page.keyboard.press("Escape")
    page.click("[data-act=history]")
    page.wait_for_selector(".rb-past li")
    assert shown["board"].strip()[:20] in page.inner_text(".rb-past")
    assert page.evaluate("window.hacked") is None, "history"
    page.goto(app.url + "lead/quality")
    page.wait_for_selector(".task")
    shown["quality"] = page.inner_text("main")
    assert all(name in shown["quality"] for name in PEOPLE)
    page.click(".task a")
    page.wait_for_selector(".rb-opinions li")
    shown["decision"] = page.inner_text(".rb-opinions") + page.inner_text(".rb-prompt")
    for where, text in shown.items():
        assert "${window.hacked = 1}" in text or RUNS[:20] in text, where
        assert page.evaluate("window.hacked") is None, where
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_submit_is_one_request_that_brings_the_next_task(app, open_page):
    page = open_page(app.url)
    page.wait_for_url("**/sign-in")
    sign_in(page, LEADS[2])
    before = page.inner_text(".rb-prompt")
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.post_data or request.url))
    submit_as_shown(page)
    page.wait_for_function(
        "before => (document.querySelector('.rb-prompt').innerText !== before)"
        " || !document.querySelector('.rb-empty').hidden",
        arg=before,
    )
    assert len(calls) == 1
    assert '"submit"' in calls[0]
