"""A lead opens a task on which two people differ, decides, and is back at the list."""

import pytest

from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store

pytestmark = pytest.mark.browser

NOTE = "<img src=x onerror='window.hacked = 1'> ${window.hacked = 1}"
LINES = [{"prompt": "Which <b>one</b>?", "responses": ["good", "bad"]}]


def test_a_lead_decides_from_the_dashboard(serve, open_page):
    app = serve(LINES, "--annotator", "lea")
    with Store(app.db) as store:
        set_overlap(store.connections, 2)
        queue = TaskQueue(store)
        for name, best in {"ann": "good", "bob": "bad"}.items():
            queue.add_annotator(name)
            task = queue.next_task(name)
            place = task.texts.index(best)
            tiers = ((place,), (1 - place,))
            queue.submit(name, Submission(id=name, task_id=task.id, tiers=tiers, note=NOTE))
    page = open_page(app.url)
    page.goto(app.url + "dashboard")
    assert "Which <b>one</b>?" in page.inner_text(".task h3")
    page.click(".task a:has-text('decide')")
    page.wait_for_selector(".rb-opinions li")
    said = [item.inner_text() for item in page.query_selector_all(".rb-opinions li b")]
    assert sorted(said) == ["A > B", "B > A"]
    assert NOTE in page.inner_text(".rb-opinions")
    assert page.evaluate("window.hacked") is None
    page.reload()  # the decision stays open
    page.wait_for_selector(".rb-opinions li")
    page.locator(".rb-list .rb-card:has-text('good')").focus()
    page.keyboard.press("1")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".task:has-text('decided')")
    with Store(app.db) as store:
        [record] = store.ranked_prompts()
        [ranking] = record.rankings
        texts = {response.id: response.text for response in record.responses}
        assert ranking.annotator == "lea"
        assert [texts[tier[0]] for tier in ranking.tiers] == ["good", "bad"]
        assert ranking.flags == ("adjudicated",)
