"""The content policy of every page: what stands in it is allowed by hash, and nothing else is."""

import base64
import hashlib
import re

import httpx
import pytest
from fastapi import FastAPI

from labeling_app.annotators.users import User, Users
from labeling_app.web.access.content_policy import policy_of
from labeling_app.web.access.middleware import AuthMiddleware
from labeling_app.web.app import build_app
from labeling_app.web.board.session import Board
from labeling_app.web.live.live import Live
from tests.labeling_app.conftest import run_async

PAGE = """<style>p { color: red }</style><SCRIPT src="/a.js"></SCRIPT>
<script>let one;</script><p style="color: blue"></p><script type="module">
let two;
</script>"""


def quoted(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_a_policy_allows_what_stands_in_the_page():
    assert policy_of(PAGE) == (
        "default-src 'none'; "
        f"script-src 'self' {quoted('let one;')} {quoted(chr(10) + 'let two;' + chr(10))}; "
        f"style-src 'self' {quoted('p { color: red }')}; img-src data:; base-uri 'none'; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'"
    )


@pytest.fixture
def pages(store, queue, fill):
    """Every HTML page of the app, by path and role."""
    fill(2, 2)
    live = Live(store, [], num_responses=2, has_sign_in=True, note=None)

    async def build() -> FastAPI:  # without a running loop Gradio makes one and never closes it
        return build_app(Board(store, queue, has_sign_in=True), live)

    app = run_async(build())

    async def get(path: str, role: str) -> httpx.Response:
        user = User(name="ann", role=role, disabled=False, epoch=0)
        protected = AuthMiddleware(
            app, find_user=lambda request: user, users=Users(store), secret="s"
        )
        transport = httpx.ASGITransport(protected)
        async with httpx.AsyncClient(transport=transport, base_url="http://label") as client:
            return await client.get(path)

    asked = [("/sign-in", "lead"), ("/lead/quality", "lead"), ("/lead/quality", "annotator")]
    asked += [("/live", "annotator"), ("/", "annotator")]
    found = {(path, role): run_async(get(path, role)) for path, role in asked}
    live.close()
    return found


def test_pages_that_are_not_of_gradio_allow_nothing_unsafe(pages):
    for (path, _), answer in pages.items():
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "frame-ancestors 'none'" in policy
        if path != "/":
            assert "unsafe" not in policy
            # What the policy would block: attributes that are code or styles.
            assert not re.search(r"<[^>]*\s(style|on[a-z]+)\s*=", answer.text), path


def test_the_board_allows_scripts_by_hash_and_what_gradio_cannot_do_without(pages):
    answer = pages["/", "annotator"]
    policy = answer.headers["content-security-policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    inline = re.findall(r"<script(?![^>]*src=)[^>]*>(.*?)</script>", answer.text, re.DOTALL)
    hashes = " ".join(map(quoted, inline))
    assert len(inline) >= 4
    assert directives["script-src"] == f"'self' {hashes} 'unsafe-eval'"
    assert directives["style-src"] == "'self' 'unsafe-inline'"
    assert directives["connect-src"] == directives["form-action"] == "'self'"
    assert int(answer.headers["content-length"]) == len(answer.content)
