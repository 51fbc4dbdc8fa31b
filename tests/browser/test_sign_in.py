"""Several people sign in, each ranks under the own name, and a restart signs nobody out."""

import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import default_overlap, set_overlap
from labeling_app.db.store import Store
from rlhf.cli import main
from tests.browser.accessibility import require_accessible
from tests.browser.conftest import submit_as_shown

pytestmark = pytest.mark.browser

LINES = [{"prompt": f"question {n}", "responses": ["a", "b"]} for n in range(6)]


@pytest.fixture
def served(serve, tmp_path, monkeypatch, capsys):
    """The app with two users; ann's name is hostile."""
    source = tmp_path / "first.jsonl"
    source.write_text(json.dumps(LINES[0]))
    db = str(tmp_path / "labels.db")
    assert main(["import", str(source), "--db", db]) == 0
    for name in ("<b>ann", "bob"):
        monkeypatch.setattr("sys.stdin", io.StringIO("long enough\n"))
        assert main(["users", "add", name, "--db", db, "--password-stdin"]) == 0
    return serve(LINES)


def sign_in(page, name: str, password: str = "long enough") -> None:
    page.wait_for_url("**/sign-in")
    page.fill("#name", name)
    page.fill("#password", password)
    page.keyboard.press("Enter")


INJECTED = """() => {
  const markup = '<img src=x onerror="window.attribute = 1">';
  document.body.insertAdjacentHTML('beforeend', markup);
  const script = document.createElement('script');
  script.textContent = 'window.element = 1';
  document.body.append(script);
  const outside = fetch('http://127.0.0.2:1/').then(() => 'sent', () => 'refused');
  const frame = document.createElement('iframe');
  frame.srcdoc = '<script>parent.framed = 1</' + 'script>';
  document.body.append(frame);
  const wait = new Promise(done => setTimeout(done, 300));
  return Promise.all([outside, wait]).then(
    () => [window.attribute, window.element, window.framed].map(value => value ?? 0));
}"""


class Unfollowed(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object) -> None:
        """The browser follows, not the proxy."""


@contextmanager
def proxy_to(app_url: str) -> Iterator[str]:
    """A proxy as nginx is by default: the app gets its own address as the Host."""
    opener = urllib.request.build_opener(Unfollowed)

    class Passing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
            request = urllib.request.Request(
                app_url.rstrip("/") + self.path, body or None, headers, method=self.command
            )
            try:
                answer = opener.open(request, timeout=20)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.read())

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_people_sign_in_and_rank_through_a_proxy_with_a_host_of_its_own(served, browser):
    # Not `open_page`: Gradio asks for its theme at the app's own address, which the policy blocks.
    with proxy_to(served.url) as url, browser.new_page() as page:
        page.goto(url)
        sign_in(page, "bob")
        page.wait_for_selector(".rb-list .rb-card")
        submit_as_shown(page)
        page.wait_for_selector(".rb-progress:has-text('1 done')")


def test_a_refusal_says_why_and_the_ranking_is_kept(served, open_page):
    page = open_page(served.url)
    sign_in(page, "bob")
    page.wait_for_selector(".rb-list .rb-card")
    page.route("**/board", lambda route: route.fulfill(status=403, json={"error": "Not from b."}))
    submit_as_shown(page)
    page.wait_for_selector(".rb-error:has-text('Not from b. Your work is kept in this browser')")
    page.unroute("**/board")
    page.wait_for_selector(".rb-progress:has-text('1 done')")
    assert page.locator(".rb-error").is_hidden()


def test_two_people_get_different_tasks_under_their_own_names(served, open_page):
    page, other = open_page(served.url), open_page(served.url)
    sign_in(page, "<b>ann")
    page.wait_for_selector(".rb-list .rb-card")
    assert page.inner_text(".rb-who") == "<b>ann"
    sign_in(other, "bob")
    other.wait_for_selector(".rb-list .rb-card")
    assert page.inner_text(".rb-prompt") != other.inner_text(".rb-prompt")
    for one in (page, other):
        submit_as_shown(one)
        one.wait_for_selector(".rb-progress:has-text('1 done')")
    with Store(served.db) as store:
        names = {r.annotator for record in store.ranked_prompts() for r in record.rankings}
    assert names == {"<b>ann", "bob"}


def test_a_restart_signs_nobody_out_and_signing_out_does(served, open_page):
    page = open_page(served.url)
    sign_in(page, "bob", "wrong")
    page.wait_for_selector(".problem:has-text('Name or password is wrong')")
    sign_in(page, "bob")
    page.wait_for_selector(".rb-list .rb-card")
    with Store(served.db) as store:
        set_overlap(store.connections, 2)
    served.stop()
    served.start()
    with Store(served.db) as store:
        assert default_overlap(store.connections.db) == 2
    page.reload()
    page.wait_for_selector(".rb-list .rb-card")
    copied = page.context.cookies()
    page.click("text=Sign out")
    page.wait_for_url("**/sign-in")
    page.go_back()
    page.wait_for_url("**/sign-in")
    assert page.locator(".rb-card").count() == 0
    page.context.add_cookies(copied)
    page.goto(served.url)
    page.wait_for_url("**/sign-in")


def test_a_person_changes_her_password(served, open_page):
    page, other = open_page(served.url), open_page(served.url)
    for one in (page, other):
        sign_in(one, "<b>ann")
        one.wait_for_selector(".rb-list .rb-card")
    page.get_by_role("link", name="Password").click()
    require_accessible(page, "password")
    page.fill("#old", "a guess")
    page.fill("#new", "even longer")
    page.keyboard.press("Enter")
    page.wait_for_selector(".problem:has-text('The current password is wrong.')")
    require_accessible(page, "password refused")
    page.fill("#old", "long enough")
    page.fill("#new", "even longer")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=status]:has-text('Your password is changed.')")
    require_accessible(page, "password changed")
    page.click("text=Rank responses")
    page.wait_for_selector(".rb-list .rb-card")
    other.reload()
    sign_in(other, "<b>ann", "even longer")
    other.wait_for_selector(".rb-list .rb-card")


def test_a_ranking_made_while_signed_out_is_sent_after_signing_in_again(served, open_page):
    page = open_page(served.url)
    sign_in(page, "bob")
    page.wait_for_selector(".rb-list .rb-card")
    with Store(served.db) as store:
        Users(store).reset_password("bob", "another one")
    submit_as_shown(page)
    page.wait_for_selector(".rb-sign-in:has-text('your ranking is kept')")
    page.click(".rb-sign-in a")
    sign_in(page, "bob", "another one")
    page.wait_for_selector(".rb-progress:has-text('1 done')")


def test_a_page_stores_nothing_under_the_name_of_who_signed_in_after(served, open_page):
    page = open_page(served.url)
    sign_in(page, "<b>ann")
    page.wait_for_selector(".rb-list .rb-card")
    other = page.context.new_page()  # the same browser, and so the same cookie
    other.goto(served.url)
    other.click("text=Sign out")
    sign_in(other, "bob")
    other.wait_for_selector(".rb-list .rb-card")
    submit_as_shown(page)
    page.wait_for_selector(
        '.rb-error:has-text("This page was opened by <b>ann, but bob is signed in")'
    )
    page.reload()
    page.wait_for_selector(".rb-who:has-text('bob')")
    with Store(served.db) as store:
        assert store.counts()["rankings"] == 0
    page.click("text=Sign out")
    sign_in(page, "<b>ann")
    page.wait_for_selector(".rb-progress:has-text('1 done')")
    with Store(served.db) as store:
        names = [r.annotator for record in store.ranked_prompts() for r in record.rankings]
    assert names == ["<b>ann"]


def test_the_dashboard_is_for_leads_and_what_is_injected_does_not_run(
    served, open_page, browser, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("long enough\n"))
    arguments = ["users", "add", "lea", "--role", "lead", "--password-stdin"]
    assert main([*arguments, "--db", str(served.db)]) == 0
    page = open_page(served.url)
    sign_in(page, "<b>ann")
    page.wait_for_selector(".rb-list .rb-card")
    submit_as_shown(page)
    page.wait_for_selector(".rb-progress:has-text('1 done')")
    assert page.locator(".rb-lead").is_hidden()
    assert page.goto(served.url + "lead").status == 403
    lead = open_page(served.url)
    sign_in(lead, "lea")
    lead.click(".rb-lead")
    lead.click("nav a:has-text('Quality')")
    lead.wait_for_selector("h1:has-text('Quality')")
    assert "<b>ann" in lead.inner_text("tbody")
    with browser.new_page() as page:  # not `open_page`, which fails on what is blocked
        page.goto(served.url)
        assert page.evaluate(INJECTED) == [0, 0, 0]
        sign_in(page, "lea")
        page.wait_for_selector(".rb-list .rb-card")
        assert page.evaluate(INJECTED) == [0, 0, 0]
        page.goto(served.url + "lead/quality")
        assert page.evaluate(INJECTED) == [0, 0, 0]
