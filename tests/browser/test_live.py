"""Live mode in a real browser, with a real server behind it and with a model in the process."""

import re

import pytest

from labeling_app.data_io.exporting import export
from labeling_app.db.store import Store
from rlhf.records.jsonl import read_jsonl
from tests.browser.accessibility import require_accessible_in_both
from tests.browser.conftest import App, ProcessApp
from tests.servers.chat import ChatServer

pytestmark = pytest.mark.browser

LINES = [{"prompt": "question", "responses": ["a", "b"]}]
HOSTILE = (
    "<script>window.hacked=1</script> <img src=x onerror=window.hacked=1> ${1+1} \\u12 {{7*7}}"
)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The app over a new database and a chat server, which is at `app.chat`."""
    db = tmp_path_factory.mktemp("live") / "labels.db"
    with ChatServer() as chat:
        served = App(db, "--endpoint", chat.url, "--annotator", "ann")
        served.chat = chat
        yield served
        served.stop()


@pytest.fixture
def chat(app):
    answers = app.chat.answers
    yield app.chat
    app.chat.answers, app.chat.failures = answers, []
    app.chat.gate.set()


@pytest.fixture
def talk(app, chat, open_page):
    """A page of live mode where nothing has been asked."""

    def opening(**context):
        page = open_page(app.url + "live", **context)
        page.wait_for_selector(".who:has-text('ann')", state="attached")
        page.click("[data-act=new]")
        page.wait_for_selector(".empty:visible")
        return page

    return opening


def ask(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


SENT_AT_ONCE = """
new MutationObserver((_, observer) => {
  const box = document.getElementById("prompt");
  if (!box) return;
  observer.disconnect();
  box.value = "Too early?";
  box.form.requestSubmit();
}).observe(document, { childList: true, subtree: true });
"""


def test_a_question_sent_before_the_page_has_loaded_stays(app, open_page):
    page = open_page(app.url + "live")
    page.add_init_script(SENT_AT_ONCE)
    page.goto(app.url + "live")
    page.wait_for_selector(".who:has-text('ann')", state="attached")
    assert page.url == app.url + "live"
    assert page.input_value("#prompt") == "Too early?"


def wait_for_answers(page) -> None:
    page.wait_for_selector(".saved:has-text('The answers are complete')")


def wait_for_saved(page) -> None:
    page.wait_for_selector(".saved:has-text('Saved')")


def stored(app, text: str) -> list:
    with Store(app.db) as store:
        return [r for r in store.ranked_prompts() if r.prompt.text == text]


def about(record, folder) -> list[dict]:
    rows = read_jsonl(folder / "train.jsonl")
    return [row for row in rows if row["prompt"] == record.prompt.chat]


def test_thumbs_pick_edit_and_a_second_turn_by_keyboard(talk, app, tmp_path):
    page = talk()
    ask(page, "How was the tour?")
    wait_for_answers(page)
    assert sorted(page.locator(".card .text").all_inner_texts()) == [
        "four five six", "one two three"
    ]  # fmt: skip
    assert "served-model" not in page.content()
    page.keyboard.press("-")  # the first card is marked
    wait_for_saved(page)
    page.keyboard.press("b")
    page.wait_for_selector(".card.best[aria-label='Answer B']")
    page.keyboard.press("e")
    page.fill("#better", "written by hand")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".edited:has-text('written by hand')")
    ask(page, "And then?")
    wait_for_answers(page)
    assert [m["content"] for m in app.chat.calls[-1]["messages"]] == [
        "How was the tour?", "written by hand", "And then?"
    ]  # fmt: skip
    [first] = stored(app, "How was the tour?")
    with Store(app.db) as store:
        export(store, tmp_path / "d", "demonstrations")
        export(store, tmp_path / "k", "kto")
    assert {flags for r in first.rankings for flags in (r.flags or ("pick",))} == {
        "thumbs-down", "pick", "edited"
    }  # fmt: skip
    [row] = about(first, tmp_path / "d")
    assert row["completion"][0]["content"] == "written by hand"
    assert sorted(row["label"] for row in about(first, tmp_path / "k")) == [False, True, True]


def test_votes_before_the_end_are_stored_with_it(talk, app, chat):
    page = talk()
    chat.gate.clear()
    ask(page, "Slow?")
    page.wait_for_selector("[data-act=tie]:enabled")
    page.keyboard.press("a")
    page.wait_for_selector(".saved:has-text('Your vote will be sent')")
    assert stored(app, "Slow?") == []
    other = page.context.new_page()  # others, here on the board, do not wait
    other.goto(app.url)
    other.wait_for_selector(".rb-empty:visible")
    other.wait_for_selector("a:visible:has-text('Ask the models')")
    other.close()
    chat.gate.set()
    wait_for_saved(page)
    [record] = stored(app, "Slow?")
    texts = {response.id: response.text for response in record.responses}
    shown = page.locator(".card .text").first.inner_text()
    [ranking] = record.rankings
    assert texts[ranking.tiers[0][0]].replace("*", "") == shown


def test_nobody_can_vote_before_every_answer_has_words(talk, app):
    held = []
    page = talk()
    page.route("**/live/stream/**", lambda route: held.append(route))
    ask(page, "Too early to vote?")
    page.wait_for_selector(".card .text.coming")
    buttons = page.locator(".pick, .thumb, [data-act=tie], [data-act=all-bad]")
    assert buttons.count() == 8
    assert all(button.is_disabled() for button in buttons.all())
    for key in ("a", "=", "x", "+"):
        page.keyboard.press(key)
    assert page.locator("[aria-pressed=true]").count() == 0
    held[0].continue_()
    wait_for_answers(page)
    assert all(button.is_enabled() for button in buttons.all())
    page.keyboard.press("a")
    wait_for_saved(page)
    assert [len(record.rankings) for record in stored(app, "Too early to vote?")] == [1]


def test_a_reload_in_the_middle_finds_everything_again(talk, app, chat):
    page = talk()
    chat.gate.clear()
    ask(page, "Slower?")
    page.wait_for_selector("[data-act=tie]:enabled")
    page.keyboard.press("=")
    page.reload()
    page.wait_for_selector(".turn.user:has-text('Slower?')")
    chat.gate.set()
    wait_for_answers(page)
    page.wait_for_selector("[data-act=tie][aria-pressed=true]")
    page.reload()
    page.wait_for_selector("[data-act=tie][aria-pressed=true]")
    [record] = stored(app, "Slower?")
    assert [len(ranking.tiers) for ranking in record.rankings] == [1]


def test_a_failure_is_shown_and_the_question_can_be_sent_again(talk, app, chat):
    page = talk()
    chat.failures = ["503", "503"]
    ask(page, "Hello?")
    page.wait_for_selector(".problem:has-text('The model server refused the question')")
    assert page.input_value("#prompt") == "Hello?"
    page.click("[data-act=again]")
    wait_for_answers(page)
    assert page.input_value("#prompt") == ""
    assert page.locator(".problem").is_hidden()


def test_hostile_text_stays_text(talk, app, chat):
    page = talk()
    chat.answers = [HOSTILE, HOSTILE + " again"]
    ask(page, HOSTILE)
    wait_for_answers(page)
    page.keyboard.press("a")
    wait_for_saved(page)
    page.keyboard.press("e")
    page.fill("#better", HOSTILE + " edited")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".edited:has-text('edited')")
    page.reload()
    page.wait_for_selector(".card.best")
    for place in (".turn.user", ".card.best .text", ".edited .text"):
        shown = page.inner_text(place)
        assert "<script>window.hacked=1</script>" in shown
        assert "${1+1}" in shown
        assert "{{7*7}}" in shown
    assert page.evaluate("window.hacked") is None


def test_on_a_phone_everything_fits_and_can_be_touched(talk):
    page = talk(viewport={"width": 375, "height": 720}, has_touch=True)
    ask(page, "How was it?")
    wait_for_answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for node in page.locator("button:visible").all():
        assert node.bounding_box()["height"] >= 44
    page.tap(".pick >> nth=1")
    wait_for_saved(page)
    assert page.locator(".card >> nth=1").get_attribute("class") == "card best"


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desk", "phone"])
def test_votes_are_in_sight_however_long_the_answers_are(talk, chat, size):
    width, height = size
    page = talk(viewport={"width": width, "height": height}, has_touch=True)
    chat.answers, chat.ending = ["word " * 3000, "**word** " * 3000], "length"
    try:
        ask(page, "What is long?")
        wait_for_answers(page)
        assert page.locator(".ending").all_inner_texts() == ["Cut off at 256 tokens"] * 2
        page.evaluate("window.scrollTo(0, 1000)")
        for vote in ("A is better", "B is better", "Tie", "All bad"):
            # Playwright would scroll to a button: what is at its middle must be the button.
            middle = page.get_by_role("button", name=vote, exact=True).evaluate(
                """node => {
                  const { x, y, width, height } = node.getBoundingClientRect();
                  return node.contains(document.elementFromPoint(x + width / 2, y + height / 2));
                }"""
            )
            assert middle, vote
        thumb = page.locator(".card .up").first.bounding_box()
        assert 0 <= thumb["y"] <= height - thumb["height"]
        page.get_by_role("button", name="All bad").click()
        wait_for_saved(page)
        assert page.evaluate("scrollY") == 1000
    finally:
        chat.ending = "stop"


def test_every_state_is_accessible(talk, chat):
    page = talk()
    require_accessible_in_both(page, "empty")
    chat.gate.clear()
    ask(page, "How was it?")
    page.wait_for_selector(".card .text:has-text('one')")
    require_accessible_in_both(page, "streaming")
    chat.gate.set()
    wait_for_answers(page)
    page.keyboard.press("-")
    page.keyboard.press("b")
    wait_for_saved(page)
    require_accessible_in_both(page, "judged")
    page.keyboard.press("e")
    require_accessible_in_both(page, "editing")
    page.keyboard.press("Escape")
    chat.failures = ["503", "503"]
    ask(page, "And?")
    page.wait_for_selector(".problem [data-act=again]:visible")
    require_accessible_in_both(page, "failed")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    require_accessible_in_both(page, "keys")


def test_a_model_in_the_process(serve, open_page, tiny_model):
    app = serve(LINES, "--model", str(tiny_model), "--max-new-tokens", "12", kind=ProcessApp)
    page = open_page(app.url + "live")
    ask(page, "How was the trip?")
    wait_for_answers(page)
    page.keyboard.press("a")
    wait_for_saved(page)
    [record] = stored(app, "How was the trip?")
    assert [response.model for response in record.responses] == [str(tiny_model)] * 2
    assert all(re.fullmatch("[0-9a-f]{16}", r.model_fingerprint) for r in record.responses)
    assert [len(tier) for tier in record.rankings[0].tiers] == [1, 1]


def test_thinking_is_folded_while_it_streams_and_afterwards(talk, chat):
    chat.answers = ["<think>two and two</think> It is **4**."]
    chat.gate.clear()  # holds answers back after their first word
    page = talk()
    ask(page, "How much is it?")
    thinking = page.locator(".card .thinking").first
    thinking.wait_for()
    assert thinking.inner_text() == "Thinking"
    chat.gate.set()
    wait_for_answers(page)
    assert page.locator(".card .text").all_inner_texts() == ["Thinking\n\nIt is 4."] * 2
    page.locator(".card summary").first.click()
    assert "two and two" in page.locator(".card .text").first.inner_text()
    page.keyboard.press("Enter")  # the summary has the focus
    assert "two and two" not in page.locator(".card .text").first.inner_text()
