"""One person's long tables keep nobody else waiting."""

import asyncio
import statistics
import sys
import time

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.applications import Starlette

from labeling_app.annotators.users import User
from labeling_app.web.access.middleware import AuthMiddleware
from labeling_app.web.board import rendering
from labeling_app.web.board.rendering import to_html
from labeling_app.web.board.route import add_board_route
from labeling_app.web.board.screens import QUICK_CHARACTERS, Unrendered, render, render_quick
from labeling_app.web.board.session import Board, BoardRequest
from labeling_app.web.http_server import SWITCH_SECONDS
from tests.labeling_app.conftest import build_prompt, build_responses, run_async

ROW = "|1|2|3|4|\n"
TABLE = "|a|b|c|d|\n|-|-|-|-|\n" + ROW * 4900


def as_screen(*texts: str) -> dict:
    return {"task": {"prompt": [], "cards": [{"html": Unrendered(text)} for text in texts]}}


def html_of(screen: dict) -> list:
    return [card["html"] for card in screen["task"]["cards"]]


def test_short_texts_are_rendered_at_once_and_long_ones_when_they_are_at_hand():
    assert html_of(render_quick(as_screen("*a*", "b"))) == ["<p><em>a</em></p>\n", "<p>b</p>\n"]
    long = [f"{number} " + "word " * (QUICK_CHARACTERS // 10) for number in range(3)]
    left = render_quick(as_screen(*long))
    assert html_of(left) == [Unrendered(text) for text in long]
    assert html_of(render(left)) == [f"<p>{text.strip()}</p>\n" for text in long]
    assert html_of(render_quick(as_screen(*long))) == html_of(left)
    assert render_quick({"ok": True}) == {"ok": True}


def test_what_is_kept_is_bounded(monkeypatch):
    cache = rendering._HtmlCache()
    monkeypatch.setattr(rendering, "_cache", cache)
    monkeypatch.setattr(rendering, "MAX_CACHED_CHARACTERS", 1000)
    texts = [f"{number} " + "x" * 90 for number in range(20)]
    for text in texts:
        to_html(text)
    assert cache.get(texts[0]) is None
    assert cache.get(texts[-1]) == f"<p>{texts[-1]}</p>\n"
    assert cache._characters <= 1000
    assert sum(len(text) + len(html) for text, html in cache._html.items()) == cache._characters


@pytest.mark.parametrize(
    "text",
    [TABLE, "[" * 49_000, "*a* " * 12_000, "- a\n" * 12_000, "# a\n" * 12_000, "|\n" * 24_000],
    ids=["table", "brackets", "emphasis", "lists", "headings", "rows"],
)
def test_rendering_takes_a_bounded_time(monkeypatch, text):
    monkeypatch.setattr(rendering, "_cache", rendering._HtmlCache())
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.02)
    start = time.thread_time()
    html = to_html(text)
    assert time.thread_time() - start < 0.5
    assert html == f"<pre>{rendering.nh3.clean_text(text)}</pre>"


def test_no_text_is_rendered_while_the_database_is_written(store, queue, fill, monkeypatch):
    fill(1, 2)
    queue.add_annotator("ann")
    in_transaction = []

    def noting(text: str) -> str:
        in_transaction.append(store.connections.db.conn.in_transaction)
        return real(text)

    real = rendering._render
    monkeypatch.setattr(rendering, "_cache", rendering._HtmlCache())
    monkeypatch.setattr(rendering, "_render", noting)
    [screen] = Board(store, queue).answer_all([BoardRequest("ann", {"op": "next"})])
    assert in_transaction == [False] * 3
    assert all(text.startswith("<p>prompt 0") for text in html_of(screen))


@pytest.fixture
def _threads_give_way_as_in_the_server():
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    yield
    sys.setswitchinterval(before)


def waits_while_tables_are_rendered(store, queue, count: int) -> list[float]:
    """How long each of bob's requests waits while ann's screen of tables is rendered."""
    heavy = build_prompt("Which table?")
    store.add_prompts([heavy])
    store.add_responses(build_responses(heavy, [f"{TABLE}{ROW * n}" for n in range(count)]))
    board = Board(store, queue)
    for name in ("ann", "bob"):
        queue.add_annotator(name)
    app = Starlette()
    add_board_route(app, board, has_live=False)

    def client_of(name: str) -> AsyncClient:
        user = User(name=name, role="annotator", disabled=False, epoch=0)
        protected = AuthMiddleware(app, find_user=lambda request: user, users=None, secret="s")
        return AsyncClient(transport=ASGITransport(protected), base_url="http://label", timeout=60)

    async def ask_meanwhile() -> tuple[dict, list[float]]:
        async with client_of("ann") as ann, client_of("bob") as bob:
            asked = asyncio.create_task(ann.post("/board", json={"op": "next"}))
            await asyncio.sleep(0.05)
            waits = []
            while not asked.done():
                start = time.perf_counter()
                assert (await bob.post("/board", json={"op": "next"})).json()["ok"]
                waits.append(time.perf_counter() - start)
                await asyncio.sleep(0.01)
            return (await asked).json(), waits

    screen, waits = run_async(ask_meanwhile())
    assert len(screen["task"]["cards"]) == count
    assert all(text.startswith(("<pre>", "<table>")) for text in html_of(screen))
    return waits


@pytest.mark.usefixtures("_threads_give_way_as_in_the_server")
def test_others_are_answered_while_one_screen_is_rendered(store, queue):
    assert len(waits_while_tables_are_rendered(store, queue, 4)) > 3


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_give_way_as_in_the_server")
def test_others_wait_less_than_a_third_of_a_second(store, queue):
    waits = waits_while_tables_are_rendered(store, queue, 10)
    assert statistics.quantiles(waits, n=100, method="inclusive")[98] < 0.3
