"""A person ranks in a real browser, and what was on the screen is what stands in SQLite."""

import json

import pytest

from tests.browser.boards import (
    FOUR,
    MODEL,
    database,
    in_database,
    line,
    on_screen,
    tiers_on_screen,
    wait_for_rest,
    wait_for_task,
)
from tests.browser.conftest import submit_as_shown

pytestmark = pytest.mark.browser
HOSTILE = [
    "<script>window.hacked = 1</script>plain",
    '<img src=x onerror="window.hacked = 1">',
    "${window.hacked = 1} {{window.hacked}} \\u12 `",
    "[link](javascript:window.hacked=1) \u202eright to left",
]


def test_five_keys_rank_four_with_a_tie(serve, open_page):
    app = serve(FOUR, "--annotator", "ann")
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    letters = [text for _, text in on_screen(page)]  # A, B, C, D as shown
    for key in ("3", "1", "3", "4"):
        page.keyboard.press(key)
    expected = [[letters[1]], [letters[0], letters[2]], [letters[3]]]
    assert tiers_on_screen(page) == expected
    page.keyboard.press("Control+Enter")
    wait_for_task(page, "question 1")
    [row] = in_database(app.db)
    assert row["tiers"] == expected
    assert row["shown"] == letters
    assert row["annotator"] == "ann"
    assert row["duration_ms"] > 0
    assert "1 done" in page.inner_text(".rb-progress")


def test_drag_buttons_and_keys_move_flag_note_and_leave_out(serve, open_page):
    app = serve(FOUR)
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    a, b, c, d = (text for _, text in on_screen(page))

    def drag(text: str, target: str, share: float) -> None:
        wait_for_rest(page)
        grip = page.locator(f".rb-card:has-text('{text}') .rb-grip").bounding_box()
        box = page.locator(f".rb-card:has-text('{target}')").bounding_box()
        page.mouse.move(grip["x"] + 20, grip["y"] + 20)
        page.mouse.down()
        page.mouse.move(grip["x"] + 20, box["y"] + box["height"] * share, steps=6)
        page.wait_for_timeout(60)
        page.mouse.up()

    drag(d, a, 0.1)
    assert [text for _, text in on_screen(page)] == [d, a, b, c]
    drag(a, c, 0.9)
    assert [text for _, text in on_screen(page)] == [d, b, c, a]
    drag(c, d, 0.5)
    assert tiers_on_screen(page) == [[d, c], [b], [a]]
    page.click(f".rb-card:has-text('{a}') [data-act=up]")
    assert tiers_on_screen(page) == [[d, c], [a], [b]]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("x")
    assert tiers_on_screen(page) == [[d, c], [a]]
    assert b in page.inner_text(".rb-unranked")
    page.click(f".rb-item:has-text('{a}') .rb-strength:has-text('Clearly')")
    page.click(f".rb-card:has-text('{d}') [data-act=flag]")
    page.keyboard.press("Enter")  # the first flag has the focus
    page.fill(".rb-note", "a <b>note</b> ${x}")
    page.click("[data-act=submit]")
    wait_for_task(page, "question 1")
    [row] = in_database(app.db)
    assert row["tiers"] == [[d, c], [a]]
    assert json.loads(row["strengths"]) == [2]
    assert row["flags"] == [f"unsafe@{d}"]
    assert row["note"] == "a <b>note</b> ${x}"


def test_a_click_or_tap_on_a_number_marks_the_card_and_moves_nothing(serve, open_page):
    app = serve(FOUR)
    page = open_page(app.url, viewport={"width": 1000, "height": 560}, has_touch=True)
    wait_for_task(page, "question 0")

    def placed() -> list:
        pressed = page.locator(".rb-item .rb-strength[aria-pressed=true]:visible")
        return [tiers_on_screen(page), page.inner_text(".rb-unranked"), pressed.all_inner_texts()]

    def press_every_number() -> None:
        for place in range(4):
            wait_for_rest(page)
            grip = page.locator(".rb-item .rb-grip").nth(place)
            for press in (grip.click, grip.tap):
                page.focus(".rb-note")
                press()
                assert grip.evaluate("grip => grip.parentElement === document.activeElement")

    press_every_number()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-confirm:visible")  # nobody has moved anything
    page.keyboard.press("Escape")
    page.click(".rb-item:nth-child(2) .rb-strength:has-text('Tie')")
    page.click(".rb-item:nth-child(3) .rb-strength:has-text('Much')")
    page.click(".rb-item:nth-child(4) [data-act=leave]")
    before = placed()
    assert [len(tier) for tier in before[0]] == [2, 1]
    assert before[2] == ["Tie", "Much"]
    press_every_number()
    assert placed() == before

    # A shaking hand, near the edge where a drag scrolls the page.
    page.set_viewport_size({"width": 1000, "height": 400})
    low = page.locator(".rb-grip").nth(1)
    low.evaluate("grip => window.scrollBy(0, grip.getBoundingClientRect().top - 10)")
    x, y = low.bounding_box()["x"] + 20, low.bounding_box()["y"] + 20
    scrolled = page.evaluate("window.scrollY")
    assert scrolled > 0
    assert 0 < y < 80
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 3, y + 3)
    page.wait_for_timeout(200)
    page.mouse.up()
    assert page.evaluate("window.scrollY") == scrolled
    assert placed() == before


def test_touch_on_a_phone(serve, open_page):
    app = serve(FOUR)
    page = open_page(
        app.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )
    wait_for_task(page, "question 0")
    assert page.locator(".rb-hint:visible").all_inner_texts() == [
        "Best at the top. Drag by the number or use the arrows; ✕ leaves a response unranked."
    ]
    a, b, c, d = (text for _, text in on_screen(page))
    page.tap(f".rb-card:has-text('{b}') [data-act=up]")
    page.tap(f".rb-item:has-text('{c}') .rb-strength:has-text('Tie')")
    # A finger on the grip: raw touch events, as a phone sends them.
    grip = page.locator(f".rb-card:has-text('{d}') .rb-grip")
    grip.scroll_into_view_if_needed()
    start = grip.bounding_box()
    box = page.locator(f".rb-card:has-text('{a}')").bounding_box()
    session = page.context.new_cdp_session(page)
    x, y, end = start["x"] + 15, start["y"] + 15, box["y"] + box["height"] * 0.15
    touch = "Input.dispatchTouchEvent"
    session.send(touch, {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for step in range(1, 6):
        point = {"x": x, "y": y + (end - y) * step / 5}
        session.send(touch, {"type": "touchMove", "touchPoints": [point]})
    page.wait_for_timeout(60)
    session.send(touch, {"type": "touchEnd", "touchPoints": []})
    expected = [[b], [d], [a, c]]
    page.wait_for_function("document.querySelectorAll('.rb-list .dragging').length === 0")
    assert tiers_on_screen(page) == expected
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    # Not a tap: headless Chromium often drops one that follows raw touch events.
    page.click("[data-act=submit]")
    wait_for_task(page, "question 1")
    assert in_database(app.db)[0]["tiers"] == expected


def test_the_order_shown_is_a_shuffle_and_no_model_name_leaves_the_server(serve, open_page):
    app = serve(FOUR)
    traffic: list[bytes] = []
    page = open_page(
        app.url,
        before=lambda page: page.on("response", lambda answer: traffic.append(body_of(answer))),
    )
    for number in range(8):
        wait_for_task(page, f"question {number}")
        submit_as_shown(page)
    page.wait_for_selector(".rb-empty:has-text('You have ranked everything')")
    rows = in_database(app.db)
    orders = {tuple(text[-1] for text in row["shown"]) for row in rows}
    assert len(rows) == 8
    assert len(orders) > 1  # eight equal shuffles of four: once in 24^7 runs
    seen = b"".join(traffic)
    assert b"answer 0p" in seen
    assert MODEL.encode() not in seen


def body_of(response) -> bytes:
    if response.url.endswith("/board") or response.request.resource_type == "document":
        return response.body()
    return b""


def test_hostile_text_is_shown_and_does_nothing(serve, open_page):
    app = serve(
        [line(HOSTILE[0], HOSTILE), line("afterwards", ["a", "b"])], "--annotator", "<b>${x}"
    )
    page = open_page(app.url)
    page.wait_for_selector(".rb-list .rb-card")
    shown = {text for _, text in on_screen(page)}
    assert HOSTILE[0] in shown
    assert HOSTILE[1] in shown
    assert page.inner_text(".rb-who") == "<b>${x}"
    page.fill(".rb-note", HOSTILE[2])
    submit_as_shown(page)
    wait_for_task(page, "afterwards")
    assert page.evaluate("window.hacked") is None
    assert in_database(app.db)[0]["note"] == HOSTILE[2]
    assert sorted(in_database(app.db)[0]["shown"]) == sorted(HOSTILE)


def test_an_untouched_board_asks_before_it_submits(serve, open_page):
    app = serve(FOUR[:4])
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    asked, submit = page.locator(".rb-confirm"), page.locator("[data-act=submit]")
    page.keyboard.down("Control")
    for _ in range(3):  # a key held down repeats itself, which confirms nothing
        page.keyboard.down("Enter")
    page.keyboard.up("Enter")
    page.keyboard.up("Control")
    asked.wait_for()
    assert "You have not moved anything. Submit the order as shown?" in asked.inner_text()
    assert submit.inner_text() == "Submit as shown"
    page.keyboard.press("Control+Enter")
    wait_for_task(page, "question 1")
    assert len(in_database(app.db)) == 1
    assert asked.is_hidden()
    submit.click()
    asked.wait_for()
    page.keyboard.press("Escape")
    asked.wait_for(state="hidden")
    submit.click()
    asked.wait_for()
    page.click(".rb-list [data-act=down] >> nth=0")  # whoever moves something is not asked
    asked.wait_for(state="hidden")
    assert submit.inner_text() == "Submit"
    submit.click()
    wait_for_task(page, "question 2")
    page.click("[data-act=all-bad]")
    page.keyboard.press("Control+Enter")
    wait_for_task(page, "question 3")
    assert len(in_database(app.db)) == 3
    submit.click()
    asked.wait_for()
    submit.click()
    page.wait_for_selector(".rb-empty:visible")  # it goes with the last task
    assert asked.is_hidden()
    assert submit.inner_text() == "Submit"


def test_a_cut_response_says_so_and_signs_have_names(serve, open_page):
    app = serve(FOUR[:1])
    with database(app.db) as db:
        sampling = json.dumps({"max_new_tokens": 16})
        with db.conn:
            cut_short = "UPDATE responses SET finished = 0, sampling = ? WHERE text = 'answer 0p'"
            db.conn.execute(cut_short, [sampling])
            db.conn.execute("UPDATE responses SET finished = 1 WHERE text = 'answer 0q'")
    page = open_page(app.url)
    wait_for_task(page, "question 0")
    assert page.locator(".rb-ending:visible").all_inner_texts() == ["Cut off at 16 tokens"]
    cut = page.locator(".rb-card:has-text('answer 0p')")
    assert "Cut off" in cut.inner_text()
    for sign in page.query_selector_all(".rb-tool"):
        assert sign.get_attribute("title") == sign.get_attribute("aria-label") != ""
    cut.locator("[data-act=leave]").click()
    assert cut.locator("[data-act=leave]").get_attribute("title").startswith("Rank ")
