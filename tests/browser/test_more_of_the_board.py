"""The rubric, one's own history, long responses, and a dashboard that updates itself."""

import json

import pytest
from playwright.sync_api import Route
from sqlite_utils import Database

from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from rlhf.cli import main
from tests.browser.boards import in_database, line, wait_for_task
from tests.browser.conftest import submit_as_shown

pytestmark = pytest.mark.browser

LINES = [
    {"prompt": f"question {n} <b>${{x}}", "responses": ["short", "line\n\n" * 60]} for n in range(3)
]


def test_rubric_history_and_long_responses(serve, open_page, tmp_path):
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Prefer **true** answers.")
    app = serve(LINES, "--rubric", str(rubric), "--flags", "odd")
    page = open_page(app.url, viewport={"width": 1000, "height": 800})
    wait_for_task(page, "question 0")
    assert page.inner_text(".rb-rubric strong") == "true"  # opened once by itself
    page.click("[data-act=rubric]")
    assert page.locator(".rb-rubric").is_hidden()
    long = page.locator(".rb-card:has-text('line')")
    collapsed = long.bounding_box()["height"]
    long.locator("[data-act=more]").click()
    assert long.bounding_box()["height"] > collapsed + 300
    assert page.locator(".rb-card:has-text('short') [data-act=more]").is_hidden()

    submit_as_shown(page)
    wait_for_task(page, "question 1")
    page.keyboard.press("h")
    page.wait_for_selector(".rb-history[open]")
    assert "question 0 <b>${x}" in page.inner_text(".rb-past")
    assert "A > B" in page.inner_text(".rb-past")
    page.click(".rb-past button")
    wait_for_task(page, "question 0")
    page.keyboard.press("2")
    page.keyboard.press("Control+Enter")
    wait_for_task(page, "question 1")
    db = Database(app.db)
    rows = list(db.query("SELECT live, tiers, shown, rubric FROM rankings ORDER BY seq"))
    db.close()
    assert [row["live"] for row in rows] == [0, 1]
    shown = json.loads(rows[1]["shown"])
    assert json.loads(rows[1]["tiers"]) == [[shown[1]], [shown[0]]]
    assert len(rows[0]["rubric"]) == 16


@pytest.mark.parametrize("operation", ["undo", "open"])
def test_a_task_is_opened_again_after_its_draft_and_without_a_submission(
    serve, open_page, operation
):
    operations: list[str] = []
    held: list[Route] = []

    def hold(route: Route) -> None:
        operations.append(route.request.post_data_json["op"])
        if operations[-1] == operation:
            held.append(route)
        else:
            route.continue_()

    page = open_page(serve(LINES).url, lambda page: page.route("**/board", hold))
    wait_for_task(page, "question 0")
    submit_as_shown(page)
    wait_for_task(page, "question 1")
    if operation == "open":
        page.keyboard.press("h")
        page.wait_for_selector(".rb-history[open]")
    operations.clear()
    page.locator("[data-act=down]").first.evaluate("button => button.click()")
    if operation == "open":
        page.click(".rb-past button")
    else:
        page.keyboard.press("u")
    while not held:
        page.wait_for_timeout(10)
    page.keyboard.press("Control+Enter")
    page.keyboard.press("u")
    page.wait_for_timeout(1000)  # a draft is sent after 800 ms
    assert operations == ["draft", operation]
    held[0].continue_()
    wait_for_task(page, "question 0")
    page.reload()
    wait_for_task(page, "question 0")
    assert operations == ["draft", operation, "next"]


def test_a_text_that_is_cut_can_be_opened_at_any_width_and_unranked(serve, open_page):
    app = serve([{"prompt": "question 0", "responses": ["word " * 120, "line\n\n" * 60]}])
    page = open_page(app.url, viewport={"width": 1000, "height": 800})
    wait_for_task(page, "question 0")
    some, long = (
        page.locator(".rb-item:has-text('word')"),
        page.locator(".rb-item:has-text('line')"),
    )
    more = some.locator("[data-act=more]")
    assert more.is_hidden()
    page.set_viewport_size({"width": 390, "height": 800})  # a phone is turned
    more.wait_for()
    page.set_viewport_size({"width": 1000, "height": 800})
    more.wait_for(state="hidden")
    some.locator("[data-act=leave]").click()  # fewer lines are shown there
    more.wait_for()
    long.locator("[data-act=leave]").click()
    collapsed = long.bounding_box()["height"]
    long.locator("[data-act=more]").click()
    assert long.bounding_box()["height"] > collapsed + 300
    assert long.locator("[data-act=more]").inner_text() == "Show less"
    assert long.get_by_role("button", name="Show less of").is_visible()
    long.locator("[data-act=more]").click()
    assert long.bounding_box()["height"] < collapsed + 1


def test_the_dashboard_renews_itself_where_nobody_is_reading(serve, open_page):
    app = serve(LINES, "--annotator", "ann")
    with Store(app.db) as store:
        queue = TaskQueue(store)
        task = queue.next_task("ann")
        queue.submit("ann", Submission(id="1", task_id=task.id, tiers=((0,), (1,))))
    page = open_page(
        app.url,
        before=lambda page: page.clock.install(),
        viewport={"width": 400, "height": 800},
    )
    page.goto(app.url + "lead/quality")
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => Boolean(window.isAway)})")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))

    def stays() -> bool:
        page.clock.run_for(30_000)
        page.wait_for_timeout(100)
        return requests == []

    page.evaluate("window.isAway = true")
    assert stays()
    page.evaluate("window.isAway = false")
    page.focus("#content .scroll")
    assert stays()
    page.evaluate("document.activeElement.blur(); getSelection().selectAllChildren(document.body)")
    assert stays()
    page.evaluate("getSelection().empty()")
    page.evaluate("document.querySelector('.scroll').scrollLeft = 50")
    page.evaluate("document.querySelector('#content').className = 'stale'")
    page.clock.run_for(30_000)
    page.wait_for_selector("#content:not(.stale)")
    assert page.evaluate("document.querySelector('.scroll').scrollLeft") == 50


def test_a_training_task_answers_back(serve, open_page):
    training = {
        "prompt": "exercise", "responses": ["good", "bad"], "tiers": [[0], [1]],
        "purpose": "training", "explanation": "**good** is better. <script>x</script>",
    }  # fmt: skip
    page = open_page(serve([training, *LINES]).url)
    wait_for_task(page, "exercise")
    page.locator(".rb-card:has-text('bad')").focus()
    page.keyboard.press("1")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-feedback[open]")
    assert "another order was expected" in page.inner_text(".rb-feedback h2")
    assert page.inner_text(".rb-feedback strong") == "good"
    page.keyboard.press("Escape")
    wait_for_task(page, "question 0")
    submit_as_shown(page)
    wait_for_task(page, "question 1")
    assert page.locator(".rb-feedback").is_hidden()


def test_thinking_is_folded_and_unfolds_by_mouse_and_keyboard(serve, open_page):
    said = ["<think>two and two</think>It is 4.", "It is 5."]
    page = open_page(serve([{"prompt": "question 0", "responses": said}]).url)
    wait_for_task(page, "question 0")
    card = page.locator(".rb-card:has-text('It is 4.') .rb-text")
    assert "two and two" not in card.inner_text()
    page.locator(".rb-card summary").click()
    assert "two and two" in card.inner_text()
    page.keyboard.press(" ")  # it belongs to the summary, which has the focus
    assert "two and two" not in card.inner_text()


def test_a_draft_flag_no_longer_offered_is_left_out_and_a_refusal_is_shown(serve, open_page):
    app = serve(LINES, "--annotator", "ann", "--flags", "odd")
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    page.locator("[data-act=flag]").first.click()
    page.locator(".rb-chip:visible").first.click()
    page.wait_for_selector(".rb-saved:has-text('Draft saved')")
    app.stop()
    submit_as_shown(page)
    page.wait_for_selector(".rb-error:has-text('kept in this browser and sent again')")
    app.arguments = ("--annotator", "ann", "--flags", "new")
    page.goto("about:blank")  # what waits is sent by the next page, not by this one
    app.start()
    page.goto(app.url)
    page.wait_for_selector(".rb-error:has-text('is not a flag here. Use new')")
    wait_for_task(page, "question 0")
    assert page.inner_text(".rb-saved") == "Draft restored"
    submit_as_shown(page)
    page.wait_for_selector(".rb-progress:has-text('1 done')")


def test_a_page_keeps_its_work_while_the_database_is_gone(serve, open_page):
    app = serve(LINES, "--annotator", "ann")
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    moved = app.db.with_name("moved.db")
    app.db.rename(moved)
    page.keyboard.press("2")
    page.wait_for_selector(".rb-saved:has-text('draft kept in this browser')")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-error:has-text('its file was removed or replaced')")
    page.reload()
    page.wait_for_selector(".rb-error:has-text('its file was removed or replaced')")
    moved.rename(app.db)
    page.wait_for_selector(".rb-progress:has-text('1 done')")
    wait_for_task(page, "question 1")
    with Store(app.db, read_only=True) as store:
        assert store.counts()["rankings"] == 1


def test_fields_that_the_server_does_not_send_are_shown_as_nothing(serve, open_page):
    """A page stays open while the server is upgraded or taken back to an older version."""

    def send_less(route: Route) -> None:
        answer = route.fetch()
        screen = answer.json()
        kept = {name: screen[name] for name in ("ok", "board", "annotator", "task")}
        for card in kept["task"]["cards"]:
            del card["ending"]
        route.fulfill(response=answer, json=kept)

    page = open_page(serve(LINES).url, lambda page: page.route("**/board", send_less))
    page.wait_for_selector(".rb-list .rb-card")
    page.click("[data-act=keys]")
    assert "undefined" not in page.evaluate("document.body.innerText")
    assert page.inner_text(".rb-progress") == ""


def test_a_board_with_nothing_left_shows_what_is_imported_later(serve, open_page, tmp_path):
    app = serve([line("question 0", ["a", "b"])])
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    submit_as_shown(page)
    page.wait_for_selector(".rb-empty:has-text('You have ranked everything')")
    later = tmp_path / "later.jsonl"
    later.write_text(json.dumps(line("question 1", ["c", "d"])))
    assert main(["import", str(later), "--db", str(app.db)]) == 0
    wait_for_task(page, "question 1")  # without a reload
    assert page.locator(".rb-empty").is_hidden()


def test_the_time_of_a_task_that_came_by_itself_begins_with_the_person(serve, open_page, tmp_path):
    app = serve([line("question 0", ["a", "b"])])
    page = open_page(app.url, before=lambda page: page.clock.install())
    wait_for_task(page, "question 0")
    submit_as_shown(page)
    page.wait_for_selector(".rb-empty:has-text('You have ranked everything')")
    page.mouse.move(10, 10)  # somebody is still there, before the task
    later = tmp_path / "later.jsonl"
    later.write_text(json.dumps(line("question 1", ["c", "d"])))
    assert main(["import", str(later), "--db", str(app.db)]) == 0
    page.clock.fast_forward(20_000)
    wait_for_task(page, "question 1")
    page.clock.fast_forward(600_000)  # nobody is there
    page.mouse.move(20, 20)
    page.clock.fast_forward(300_000)  # somebody thinks
    submit_as_shown(page)
    page.wait_for_selector(".rb-empty:has-text('You have ranked everything')")
    [_, ranking] = in_database(app.db)
    assert 300_000 <= ranking["duration_ms"] < 600_000
