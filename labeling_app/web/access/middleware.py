"""Who may use the app: sign-in, session cookie, Origin check and security headers.

Gradio's own `auth=` keeps sessions in memory, does not limit guessing, does not cover other routes
and sends no security headers. This ASGI middleware runs before all of it.
"""

import sqlite3

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from labeling_app.annotators.users import User, Users
from labeling_app.web.access import content_policy
from labeling_app.web.access.cookies import read_cookie
from labeling_app.web.access.origins import host_of, is_own_origin
from labeling_app.web.access.sign_in import (
    COOKIE,
    PASSWORD_PATH,
    SIGN_IN_PATHS,
    FindUser,
    SignInPage,
)
from labeling_app.web.health import unusable_database

USER = "rlhf.user"
CACHED_PATHS = ("/assets/", "/static/", "/theme.css")  # Gradio's files, the same for everybody
# /feedback and /invitation check a token instead.
OPEN_PATHS = ("/healthz", "/feedback", "/invitation")
LEAD_PATHS = ("/lead", "/dashboard")  # and whatever is below them
LEADS_ONLY = "Only leads and admins can open this page."
SECURITY_HEADERS = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # Not no-referrer: with that, browsers send "Origin: null" with our own sign-in form.
    "referrer-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
}


class AuthMiddleware:
    """ASGI middleware that lets a request through to the app, answers it, or refuses it.

    Args:
        app: the protected app.
        find_user: the user who sends a request; None if not signed in.
        users: the users of the database; None when one local person labels without signing in.
        secret: signs the cookies.
        hosts: accepted Host names; empty accepts all. A local app without sign-in accepts
            loopback names only: otherwise any web page could reach it by DNS rebinding.
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
        self.sign_in_page = SignInPage(users, secret, find_user) if users is not None else None
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
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault(content_policy.HEADER, content_policy.NOTHING)
                if not scope["path"].startswith(CACHED_PATHS):
                    headers["cache-control"] = "no-store"  # or Back would show pages after sign-out
            await send(message)

        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        except sqlite3.DatabaseError as error:
            answer = JSONResponse({"error": unusable_database(error)}, status_code=503)
        await (answer or self.app)(scope, receive, send_with_headers)

    async def _answer(self, request: Request) -> Response | None:
        """The middleware's own answer; None lets the request through."""
        refusal = self._refusal(request.method, request.headers)
        if refusal:
            return JSONResponse({"error": refusal}, status_code=403)
        path = request.scope["path"]  # the path that is routed; it may contain a "?"
        if path in OPEN_PATHS:
            return None
        if self.sign_in_page is not None and path in SIGN_IN_PATHS:
            return await self.sign_in_page.answer(request)
        # One lookup by key, which no writer blocks; a thread would cost more.
        user = self.find_user(request)
        if user is None:
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                return RedirectResponse("/sign-in", status_code=303)
            return JSONResponse({"error": "Sign in first."}, status_code=401)
        request.scope[USER] = user
        return await self._answer_user(request, user)

    async def _answer_user(self, request: Request, user: User) -> Response | None:
        if self.sign_in_page is not None and request.scope["path"] == PASSWORD_PATH:
            return await self.sign_in_page.change_password(request, user)
        return _refuse_annotator(request) if user.role == "annotator" else None

    def _refusal(self, method: str, headers: Headers) -> str:
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self.hosts and name.strip("[]") not in self.hosts:
            return f"This app cannot be reached as {name!r}. Use {', '.join(sorted(self.hosts))}."
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if is_own_origin(method, host, origin, site):
            return ""
        refusal = "Requests from other sites are refused"
        if site or not host_of(origin):
            return f"{refusal}."
        return (
            f"{refusal}: the page is from {host_of(origin)!r}, and the request is for {host!r}. "
            "Behind a proxy, make it pass on the Host header "
            "(nginx: proxy_set_header Host $http_host)."
        )


def _refuse_annotator(request: Request) -> Response | None:
    path = request.scope["path"]
    if not any(path == prefix or path.startswith(f"{prefix}/") for prefix in LEAD_PATHS):
        return None
    if request.method == "GET":
        return content_policy.html_page(LEADS_ONLY, 403)
    return JSONResponse({"error": LEADS_ONLY}, status_code=403)


def user_of_cookie(users: Users, secret: str) -> FindUser:
    """Find the user who sends a request by the signed cookie."""

    def find(request: Request) -> User | None:
        session = read_cookie(secret, request.cookies.get(COOKIE, ""))
        return users.of_session(*session) if session else None

    return find
