"""The board's route: JSON in, the screen out, who sends it from the middleware."""

import asyncio

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.applications import Starlette
from starlette.testclient import TestClient

from labeling_app.annotators.users import User, Users
from labeling_app.db.board.overlap import set_overlap
from labeling_app.web.access.middleware import AuthMiddleware, user_of_cookie
from labeling_app.web.board.route import add_board_route
from labeling_app.web.board.session import Board
from tests.labeling_app.conftest import run_async

PASSWORD = "long enough"
USERS = {"ann": "annotator", "lea": "lead"}


@pytest.fixture
def app(store, queue) -> AuthMiddleware:
    users = Users(store)
    for name, role in USERS.items():
        users.add(name, role, PASSWORD)
    inner = Starlette()
    add_board_route(inner, Board(store, queue), has_live=True)
    find = user_of_cookie(users, store.secret)
    return AuthMiddleware(inner, find_user=find, users=users, secret=store.secret)


def client_of(app: AuthMiddleware, name: str) -> TestClient:
    client = TestClient(app, base_url="http://label", follow_redirects=False)
    client.post("/sign-in", data={"name": name, "password": PASSWORD})
    return client


def test_a_screen_says_what_its_reader_may(app, fill):
    fill(2, 2)
    for name, may_lead in (("ann", False), ("lea", True)):
        screen = client_of(app, name).post("/board", json={"op": "next"}).json()
        assert (screen["ok"], screen["annotator"]) == (True, name)
        assert (screen["may_lead"], screen["has_live"]) == (may_lead, True)
    answer = client_of(app, "ann").post("/board", json={"op": "decide", "task_id": 1}).json()
    assert answer["error"] == "Only leads can decide disputed tasks."


@pytest.mark.parametrize("depth", [70, 400, 900])
def test_a_draft_that_is_nested_too_deep_is_refused(app, fill, depth):
    fill(1, 2)
    client = client_of(app, "ann")
    task = client.post("/board", json={"op": "next"}).json()["task"]["ticket"]
    state = "[" * depth + "]" * depth
    draft = f'{{"op": "draft", "ticket": "{task}", "state": {{"note": {state}}}}}'
    answer = client.post("/board", content=draft)
    assert (answer.status_code, answer.json()["ok"]) == (400, False)
    assert client.post("/board", json={"op": "next"}).json()["ok"]


def test_the_page_of_one_person_does_nothing_under_the_name_of_another(app, store, queue, fill):
    fill(1, 3)
    set_overlap(store.connections, 2)
    screens = {n: client_of(app, n).post("/board", json={"op": "next"}).json() for n in USERS}
    submit = {"op": "submit", "id": "s1", "ticket": screens["ann"]["task"]["ticket"]}
    submit |= {"tiers": [[0], [1], [2]], "annotator": "ann"}
    answer = client_of(app, "lea").post("/board", json=submit)
    assert answer.status_code == 403
    assert (
        answer.json()["error"]
        == "This page was opened by ann, but lea is signed in now. Reload it."
    )
    assert store.counts()["rankings"] == 0
    assert client_of(app, "ann").post("/board", json=submit).json()["ok"]
    assert store.counts()["rankings"] == 1


def test_what_is_no_json_object_or_too_large_is_refused(app):
    ann = client_of(app, "ann")
    answer = ann.post("/board", content=b"[1]")
    assert (answer.status_code, answer.json()["ok"]) == (400, False)
    assert answer.json()["error"] == "The body is a JSON list, not an object."
    assert ann.post("/board", content=b"x" * 1_000_001).status_code == 413
    assert TestClient(app).post("/board", json={"op": "next"}).status_code == 401


def test_many_at_once_rank_everything_exactly_once(app, store, queue, fill):
    fill(40, 2)
    people = [f"person {number}" for number in range(10)]
    for name in people:
        queue.add_annotator(name)

    async def label(name: str) -> int:
        alone = User(name=name, role="annotator", disabled=False, epoch=0)
        protected = AuthMiddleware(app.app, find_user=lambda request: alone, users=None, secret="s")
        async with AsyncClient(
            transport=ASGITransport(protected), base_url="http://label"
        ) as client:
            screen = (await client.post("/board", json={"op": "next"})).json()
            done = 0
            while screen["task"]:
                task = screen["task"]["ticket"]
                submit = {"op": "submit", "id": f"u{task}", "ticket": task, "tiers": [[0], [1]]}
                screen = (await client.post("/board", json=submit)).json()
                done += 1
            return done

    async def label_all() -> list[int]:
        return await asyncio.gather(*map(label, people))

    assert sum(run_async(label_all())) == 40
    tasks = [row[0] for row in store.connections.db.execute("SELECT task_id FROM rankings")]
    assert sorted(tasks) == list(range(1, 41))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_no_answer_can_hold_are_refused(app, number):
    with TestClient(app) as browser:
        cookie = {"name": "ann", "password": PASSWORD}
        browser.post("/sign-in", data=cookie, headers={"Origin": "http://testserver"})
        body = f'{{"op": "draft", "ticket": "x", "state": {{"x": {number}}}}}'
        answer = browser.post("/board", content=body, headers={"Origin": "http://testserver"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]
