"""Access to the app: who is let in, from where, and with which headers."""

import sqlite3
from contextlib import closing
from html import unescape

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from labeling_app.annotators.users import User, Users
from labeling_app.web.access.middleware import USER, AuthMiddleware, user_of_cookie
from labeling_app.web.access.sign_in import COOKIE


async def behind(scope, receive, send) -> None:
    user = scope.get(USER)
    await PlainTextResponse(f"hello {user.name if user else 'nobody'}")(scope, receive, send)


@pytest.fixture
def client(store) -> TestClient:
    users = Users(store)
    users.add("ann", "annotator", "long enough")
    find = user_of_cookie(users, store.secret)
    app = AuthMiddleware(behind, find_user=find, users=users, secret=store.secret)
    # Not as a context manager: that would ask `behind` for a lifespan.
    return TestClient(app, base_url="http://label:7860", follow_redirects=False)


def sign_in(client: TestClient, password: str = "long enough", **headers: str) -> httpx.Response:
    form = {"name": "ann", "password": password}
    return client.post("/sign-in", data=form, headers=headers)


def test_strangers_are_sent_to_sign_in(client):
    answer = client.get("/", headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    assert client.get("/config").status_code == 401
    assert client.post("/board").status_code == 401
    assert client.get("/healthz").text == "hello nobody"
    assert '<form method="post"' in client.get("/sign-in").text


def test_signing_in_and_out(client):
    answer = sign_in(client)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "Secure" not in cookie  # plain http; with https it is set
    assert client.get("/").text == "hello ann"
    copied = client.cookies[COOKIE]
    assert client.post("/sign-out").headers["location"] == "/sign-in"
    assert client.get("/config").status_code == 401
    client.cookies.set(COOKIE, copied)  # a copy of the cookie is worth nothing either
    assert client.get("/config").status_code == 401
    assert sign_in(client).status_code == 303
    assert client.get("/").text == "hello ann"


def test_only_posts_sign_in_and_out(client):
    sign_in(client)
    for path in ("/sign-in", "/sign-out"):
        assert '<form method="post"' in client.get(path).text
        assert client.put(path).status_code == 405
    assert client.get("/").text == "hello ann"


def test_signing_out_waits_for_nobody_and_says_when_it_could_not(client, store, monkeypatch):
    sign_in(client)
    monkeypatch.setattr("labeling_app.db.connection.BUSY_TIMEOUT_SECONDS", 0.05)
    with closing(sqlite3.connect(store.connections.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        # the next connections wait no longer than that; the last to close would delete the log
        store.connections.close()
        answer = client.post("/sign-out")
    assert answer.status_code == 503
    problem = (
        "You are still signed in: the database could not write (database is locked). "
        "Try again later."
    )
    assert answer.json() == {"error": problem}
    assert client.get("/").text == "hello ann"


@pytest.mark.parametrize("path", ["/", "/sign-in", "/dashboard", "/board", "/live/live.js"])
def test_no_browser_keeps_a_page(client, path):
    sign_in(client)
    assert client.get(path).headers["cache-control"] == "no-store"


def test_files_of_gradio_may_be_kept(client):
    sign_in(client)
    assert "cache-control" not in client.get("/assets/index.js").headers


def test_the_cookie_is_secure_over_https(store):
    users = Users(store)
    users.add("bob", "annotator", "long enough")
    app = AuthMiddleware(behind, find_user=lambda request: None, users=users, secret=store.secret)
    client = TestClient(app, base_url="https://label", follow_redirects=False)
    form = {"name": "bob", "password": "long enough"}
    assert "Secure" in client.post("/sign-in", data=form).headers["set-cookie"]
    # A proxy on this machine is believed that the browser came over https; others are not.
    for address, is_believed in (("127.0.0.1", True), ("::1", True), ("10.0.0.1", False)):
        proxy = TestClient(
            app, base_url="http://label", follow_redirects=False, client=(address, 50000)
        )
        answer = proxy.post("/sign-in", data=form, headers={"x-forwarded-proto": "https"})
        assert ("Secure" in answer.headers["set-cookie"]) is is_believed


def test_a_restart_keeps_people_signed_in(client, store):
    sign_in(client)
    users = Users(store)  # as a new process would make it
    again = AuthMiddleware(
        behind, find_user=user_of_cookie(users, store.secret), users=users, secret=store.secret
    )
    other = TestClient(again, base_url="http://label:7860", cookies=client.cookies)
    assert other.get("/").text == "hello ann"


def test_a_wrong_password_says_so_and_keeps_the_name(client):
    answer = client.post("/sign-in", data={"name": '"><script>x', "password": "wrong"})
    assert answer.status_code == 401
    assert "Name or password is wrong." in answer.text
    assert "<script>x" not in answer.text
    assert '"><script>x' not in answer.text
    assert 'value=""><script>x"' in unescape(answer.text)
    assert "set-cookie" not in answer.headers


def test_other_sites_cannot_post(client):
    sign_in(client)
    evil = {"origin": "https://evil.example", "content-type": "text/plain"}
    assert client.post("/board", headers=evil).status_code == 403
    assert client.post("/anything", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert sign_in(client, origin="https://evil.example").status_code == 403
    for site in ("cross-site", "same-site"):  # a form of another site, whatever else it says
        own = {"origin": "http://label:7860", "sec-fetch-site": site}
        assert sign_in(client, **own).status_code == 403
    assert client.post("/anything", headers={"origin": "http://label:7860"}).status_code == 200


def test_a_proxy_that_hides_the_name_is_let_through_by_browsers_or_explained(client):
    origin = {"origin": "https://labels.example"}
    assert sign_in(client, **origin, **{"sec-fetch-site": "same-origin"}).status_code == 303
    answer = sign_in(client, **origin)
    assert answer.status_code == 403
    assert answer.json()["error"] == (
        "Requests from other sites are refused: the page is from 'labels.example', and the request "
        "is for 'label:7860'. Behind a proxy, make it pass on the Host header (nginx: "
        "proxy_set_header Host $http_host)."
    )
    answer = sign_in(client, **origin, **{"sec-fetch-site": "cross-site"})
    assert answer.json()["error"] == "Requests from other sites are refused."


@pytest.mark.parametrize("path", ["/", "/sign-in", "/healthz", "/config"])
def test_every_answer_has_the_security_headers(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


def test_an_oversized_form_is_refused(client):
    assert sign_in(client, "x" * 20_000).status_code == 413


def test_a_local_app_answers_to_loopback_names_only():
    ann = User(name="ann", role="admin", disabled=False, epoch=0)
    app = AuthMiddleware(
        behind,
        find_user=lambda request: ann,
        users=None,
        secret="s",
        hosts=frozenset({"127.0.0.1", "localhost", "::1"}),
    )
    client = TestClient(app)
    for host in ("127.0.0.1:7860", "localhost", "[::1]:7860"):
        assert client.get("/", headers={"host": host}).text == "hello ann"
    answer = client.get("/", headers={"host": "rebound.example:7860"})
    assert answer.status_code == 403
    assert answer.json()["error"] == (
        "This app cannot be reached as 'rebound.example'. Use 127.0.0.1, ::1, localhost."
    )


def test_a_forged_cookie_lets_nobody_in(client):
    client.cookies.set(COOKIE, "YW5u.0.9999999999." + "0" * 64)
    assert client.get("/config").status_code == 401


def test_without_the_database_file_every_request_is_answered_503_with_a_sentence(client, store):
    sign_in(client)
    path = store.connections.path
    path.rename(path.with_name("moved.db"))
    problem = (
        "The database cannot be used (its file was removed or replaced since it was opened). "
        "Try again later."
    )
    answer = sign_in(client)
    assert answer.status_code == 503
    assert f'role="alert">{problem}</p>' in answer.text
    assert "set-cookie" not in answer.headers
    answer = client.get("/")  # with the cookie of before
    assert (answer.status_code, answer.json()) == (503, {"error": problem})
    assert answer.headers["x-frame-options"] == "DENY"
    path.with_name("moved.db").rename(path)
    assert client.get("/").text == "hello ann"
    assert sign_in(client).status_code == 303
