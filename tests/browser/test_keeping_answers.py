"""What a person has typed outlives a reload, a slip of the hand, and a server that dies."""

import pytest

from tests.browser.boards import FOUR, database, in_database, tiers_on_screen, wait_for_task
from tests.browser.conftest import ProcessApp, submit_as_shown

pytestmark = pytest.mark.browser


def test_a_draft_survives_a_reload_and_undo_brings_an_answer_back(serve, open_page):
    app = serve(FOUR)
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    for key in ("2", "1", "2", "4"):
        page.keyboard.press(key)
    before = tiers_on_screen(page)
    page.reload()
    wait_for_task(page, "question 0")
    assert tiers_on_screen(page) == before
    page.keyboard.press("Control+Enter")
    wait_for_task(page, "question 1")
    page.keyboard.press("u")
    wait_for_task(page, "question 0")
    assert tiers_on_screen(page) == before
    page.keyboard.press("s")
    page.keyboard.press("3")  # "Too long"
    wait_for_task(page, "question 1")
    with database(app.db) as db:
        assert [row["reason"] for row in db["skips"].rows] == ["Too long"]


def test_undo_of_a_skip_brings_the_work_back(serve, open_page):
    page = open_page(serve(FOUR).url)
    wait_for_task(page, "question 0")
    for key in ("2", "1", "2", "4"):
        page.keyboard.press(key)
    page.fill(".rb-note", "hm")
    before = tiers_on_screen(page)
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    page.keyboard.press("1")  # meant as a place, taken as a reason
    wait_for_task(page, "question 1")
    page.keyboard.press("u")
    wait_for_task(page, "question 0")
    assert tiers_on_screen(page) == before
    assert page.input_value(".rb-note") == "hm"


def test_a_server_that_dies_during_a_submit_loses_nothing(serve, open_page):
    app = serve(FOUR, kind=ProcessApp)
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    page.keyboard.press("4")
    app.stop()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-error:has-text('kept in this browser and sent again')")
    assert in_database(app.db) == []
    app.start()
    wait_for_task(page, "question 1")
    assert len(in_database(app.db)) == 1
    assert page.locator(".rb-error").is_hidden()


def test_a_page_closed_while_the_server_is_down_sends_at_the_next_visit(serve, open_page):
    app = serve(FOUR)
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    app.stop()
    submit_as_shown(page)
    page.wait_for_selector(".rb-error:has-text('kept in this browser and sent again')")
    app.start()
    page.goto("about:blank")
    page.goto(app.url)
    wait_for_task(page, "question 1")
    assert len(in_database(app.db)) == 1


def test_the_words_on_drafts_and_on_what_is_done_are_true(serve, open_page):
    app = serve(FOUR)
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    assert page.inner_text(".rb-progress") == "0 done"
    page.keyboard.press("4")
    assert page.inner_text(".rb-saved") == "Saving the draft …"
    page.wait_for_selector(".rb-saved:has-text('Draft saved')")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-progress:has-text('1 done')")


def test_double_submit_stores_one_row_each(serve, open_page):
    app = serve(FOUR[:2])
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    page.keyboard.press("1")
    page.evaluate(
        "() => { for (let i = 0; i < 2; i++) document.dispatchEvent(new KeyboardEvent('keydown',"
        " {key: 'Enter', ctrlKey: true, bubbles: true})) }"
    )
    wait_for_task(page, "question 1")
    assert len(in_database(app.db)) == 1


def test_a_task_that_is_open_again_says_that_the_earlier_answer_counts(serve, open_page):
    app = serve(FOUR)
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    notice = page.locator(".rb-again")
    assert notice.is_hidden()
    submit_as_shown(page)
    wait_for_task(page, "question 1")
    assert notice.is_hidden()
    page.keyboard.press("u")
    wait_for_task(page, "question 0")
    words = "Open again. Your earlier answer counts until you submit."
    assert notice.inner_text() == words
    assert page.inner_text(".rb-saved") == ""  # no draft beside the answer
    page.keyboard.press("Alt+ArrowDown")
    page.reload()
    wait_for_task(page, "question 0")
    assert notice.inner_text() == words
    assert len(in_database(app.db)) == 1
    page.keyboard.press("Control+Enter")
    wait_for_task(page, "question 1")
    assert notice.is_hidden()
