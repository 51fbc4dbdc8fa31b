"""The door of the app: sign-in, cookie, Origin check and security headers, round everything else.

Gradio's own `auth=` keeps sessions in memory, has no lockout and does not cover other routes; and
it sends no security headers. This ASGI layer stands in front of all of it.
"""

import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

import anyio.to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from labeling_app.auth import host_of, is_own_origin, make_cookie, read_cookie
from labeling_app.users import User, Users

COOKIE = "rlhf_session"
SESSION_SECONDS = 14 * 24 * 3600
MAX_FORM_BYTES = 10_000
USER = "rlhf.user"
OPEN_PATHS = ("/healthz", "/feedback")  # the latter asks for a token instead
PAGE = Path(__file__).parent / "board" / "sign_in.html"
# Gradio builds its page with inline scripts and Function(); what matters is that nothing can be
# loaded from, sent to or framed by anywhere else.
CONTENT_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # Not no-referrer: with that, browsers send "Origin: null" with our own sign-in form.
    "referrer-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
}

FindUser = Callable[[Request], User | None]


class Door:
    """ASGI layer in front of the app.

    Args:
        app: what is behind the door.
        find_user: who sends a request; None for somebody who has not signed in.
        users: the users of the database; None when one local person labels without signing in.
        secret: signs the cookies.
        hosts: Host names that are answered; empty answers all. A local app without sign-in answers
            loopback names only, or a web page could reach it through a name of its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        find_user: FindUser,
        users: Users | None,
        secret: str,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self.find_user = find_user
        self.users = users
        self.secret = secret
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, redirect, sign in, or pass the request on with its user."""
        if scope["type"] != "http":
            # No web sockets are served; lifespan events have no user.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        request = Request(scope, receive)
        answer = await self._answer(request)
        await (answer or self.app)(scope, receive, send_with_headers)

    async def _answer(self, request: Request) -> Response | None:
        """What the door itself says; None lets the request through."""
        refusal = self._refusal(request.method, request.headers)
        if refusal:
            return JSONResponse({"error": refusal}, status_code=403)
        if request.scope["path"] in OPEN_PATHS:  # what is routed; a URL ends its path at a "?"
            return None
        if self.users is not None and request.url.path in ("/sign-in", "/sign-out"):
            return await self._sign_in_or_out(request, self.users)
        # One look-up by key, which no writer holds up; handing it to a thread would cost more.
        user = self.find_user(request)
        if user is None:
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                return RedirectResponse("/sign-in", status_code=303)
            return JSONResponse({"error": "Sign in first."}, status_code=401)
        request.scope[USER] = user
        return None

    def _refusal(self, method: str, headers: Headers) -> str:
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self.hosts and name.strip("[]") not in self.hosts:
            return f"This app does not answer to the name {name!r}."
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if is_own_origin(method, host, origin, site):
            return ""
        refusal = "Requests from other sites are refused"
        if site or not host_of(origin):
            return f"{refusal}."
        return (
            f"{refusal}: the page is from {host_of(origin)!r}, and the request is for {host!r}. "
            "If a proxy stands between them, let it pass the name on "
            "(nginx: proxy_set_header Host $http_host)."
        )

    async def _sign_in_or_out(self, request: Request, users: Users) -> Response:
        if request.method != "POST":
            return sign_in_page()
        return await self._sign_in(request, users) if _is_sign_in(request) else _signed_out()

    async def _sign_in(self, request: Request, users: Users) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return JSONResponse({"error": "The form is too large."}, status_code=413)
        form = parse_qs(body.decode("utf-8", errors="replace"))
        name = form.get("name", [""])[0].strip()
        outcome = await anyio.to_thread.run_sync(users.sign_in, name, form.get("password", [""])[0])
        if outcome.user is None:
            return sign_in_page(name, outcome.problem, status_code=401)
        cookie = make_cookie(
            self.secret, outcome.user.name, outcome.user.epoch, time.time() + SESSION_SECONDS
        )
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )
        return answer


def user_of_cookie(users: Users, secret: str) -> FindUser:
    """Find the sender of a request by the signed cookie."""

    def find(request: Request) -> User | None:
        return users.of_ticket(read_cookie(secret, request.cookies.get(COOKIE, ""), time.time()))

    return find


def sign_in_page(name: str = "", problem: str = "", status_code: int = 200) -> HTMLResponse:
    """The sign-in form; it has no script at all."""
    page = PAGE.read_text(encoding="utf-8")
    page = page.replace("{{problem}}", escape(problem)).replace("{{name}}", escape(name))
    return HTMLResponse(page, status_code=status_code, headers={"cache-control": "no-store"})


def _is_sign_in(request: Request) -> bool:
    return request.url.path == "/sign-in"


def _signed_out() -> Response:
    answer = RedirectResponse("/sign-in", status_code=303)
    answer.delete_cookie(COOKIE)
    return answer
