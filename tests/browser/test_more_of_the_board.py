"""The rubric, one's own history, and long responses."""

import json

import pytest
from sqlite_utils import Database

from tests.browser.conftest import submit_as_shown

pytestmark = pytest.mark.browser

LINES = [
    {"prompt": f"question {n} <b>${{x}}", "responses": ["short", "line\n\n" * 60]} for n in range(3)
]


def wait_for(page, text: str) -> None:
    page.wait_for_selector(f".rb-prompt:has-text('{text}')")
    page.wait_for_selector(".rb-list .rb-card")


def test_rubric_history_and_long_responses(serve, open_page, tmp_path):
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Prefer **true** answers.")
    app = serve(LINES, "--rubric", str(rubric), "--flags", "odd")
    page = open_page(app.url, viewport={"width": 1000, "height": 800})
    wait_for(page, "question 0")
    assert page.inner_text(".rb-rubric strong") == "true"  # opened once by itself
    page.click("[data-act=rubric]")
    assert page.locator(".rb-rubric").is_hidden()
    long = page.locator(".rb-card:has-text('line')")
    collapsed = long.bounding_box()["height"]
    long.locator("[data-act=more]").click()
    assert long.bounding_box()["height"] > collapsed + 300
    assert page.locator(".rb-card:has-text('short') [data-act=more]").is_hidden()

    submit_as_shown(page)
    wait_for(page, "question 1")
    page.keyboard.press("h")
    page.wait_for_selector(".rb-history[open]")
    assert "question 0 <b>${x}" in page.inner_text(".rb-past")
    assert "A > B" in page.inner_text(".rb-past")
    page.click(".rb-past button")
    wait_for(page, "question 0")
    page.keyboard.press("2")
    page.keyboard.press("Control+Enter")
    wait_for(page, "question 1")
    db = Database(app.db)
    rows = list(db.query("SELECT live, tiers, shown, rubric FROM rankings ORDER BY seq"))
    db.close()
    assert [row["live"] for row in rows] == [0, 1]
    shown = json.loads(rows[1]["shown"])
    assert json.loads(rows[1]["tiers"]) == [[shown[1]], [shown[0]]]
    assert len(rows[0]["rubric"]) == 16


def test_a_training_task_answers_back(serve, open_page):
    training = {
        "prompt": "exercise", "responses": ["good", "bad"], "tiers": [[0], [1]],
        "purpose": "training", "explanation": "**good** is better. <script>x</script>",
    }  # fmt: skip
    page = open_page(serve([training, *LINES]).url)
    wait_for(page, "exercise")
    page.locator(".rb-card:has-text('bad')").focus()
    page.keyboard.press("1")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-feedback[open]")
    assert "expected otherwise" in page.inner_text(".rb-feedback h2")
    assert page.inner_text(".rb-feedback strong") == "good"
    page.keyboard.press("Escape")
    wait_for(page, "question 0")
    submit_as_shown(page)
    wait_for(page, "question 1")
    assert page.locator(".rb-feedback").is_hidden()
