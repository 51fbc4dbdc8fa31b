"""`/password`: whoever is signed in and knows the old password sets a new one."""

from collections.abc import Callable

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from labeling_app.annotators.users import Users
from labeling_app.web.access import sign_in as access
from labeling_app.web.access.middleware import AuthMiddleware, user_of_cookie

OLD, NEW = "long enough", "even longer"


@pytest.fixture
def browser(store) -> Callable[[], TestClient]:
    """A browser in which ann has signed in."""
    users = Users(store)
    users.add("ann", "annotator", OLD)
    find = user_of_cookie(users, store.secret)
    board = PlainTextResponse("board")
    app = AuthMiddleware(board, find_user=find, users=users, secret=store.secret)

    def signed_in() -> TestClient:
        client = TestClient(app, base_url="http://label:7860", follow_redirects=False)
        assert sign_in(client, OLD) == 303
        return client

    return signed_in


def sign_in(client: TestClient, password: str) -> int:
    return client.post("/sign-in", data={"name": "ann", "password": password}).status_code


def change(client: TestClient, old: str, new: str, **headers: str) -> httpx.Response:
    return client.post("/password", data={"old": old, "new": new}, headers=headers)


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    said = answer.text.partition('role="alert">')[2].partition("</p>")[0]
    return answer.status_code, said


def test_other_sessions_end_and_this_one_goes_on(browser):
    here, there = browser(), browser()
    answer = change(here, OLD, NEW)
    assert answer.status_code == 200
    assert "Your password is changed." in answer.text
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=lax" in answer.headers["set-cookie"]
    assert here.get("/").text == "board"
    assert there.get("/").status_code == 401
    assert sign_in(there, OLD) == 401
    assert sign_in(there, NEW) == 303
    assert here.get("/").text == "board"


def test_what_is_refused_changes_nothing(browser):
    here, there = browser(), browser()
    wrong = (401, "The current password is wrong.")
    short = (400, "The password has 7 characters. Use at least 8.")
    assert problem_of(change(here, "a guess", NEW)) == wrong
    assert problem_of(change(here, "", NEW)) == wrong
    assert problem_of(change(here, OLD, "1234567")) == short
    assert problem_of(change(here, OLD, "x" * 501))[0] == 400
    assert change(here, OLD, NEW, origin="https://example.com").status_code == 403
    assert here.post("/password", content=b"x" * 20_000).status_code == 413
    here.cookies.clear()
    assert change(here, OLD, NEW).status_code == 401
    assert there.get("/").text == "board"
    assert sign_in(there, OLD) == 303


def test_guesses_are_slowed_down_as_at_sign_in(browser, monkeypatch):
    waits = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(access.anyio, "sleep", note)
    here = browser()
    for number in range(6):
        change(here, f"guess {number}", NEW)
        change(here, OLD, "short")  # checks no password, and so counts as no attempt
    # The sign-in was right; then five wrong passwords are free.
    assert waits == [0.0] * 6 + [0.5]
    assert sign_in(here, "guess 7") == 401
    assert waits[-1] == pytest.approx(0.55)  # they count together
