"""`/sign-in` and `/sign-out`: the form, its limits, the cookie.

Guesses are slowed down, and nobody is locked out: beyond a few wrong passwords for a name or from
an address an attempt waits before it is checked, longer with every further one, and only so many
may wait at once. Whoever has the right password gets in after that wait. The same happens for
names that nobody has.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

import anyio
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from labeling_app.annotators.users import SignIn, User, Users
from labeling_app.web.access.attempts import Attempts, network_of
from labeling_app.web.access.content_policy import html_page
from labeling_app.web.access.passwords import make_cookie
from labeling_app.web.request_bodies import BodyError, read_body

SIGN_IN_PATHS = ("/sign-in", "/sign-out")
COOKIE = "rlhf_session"
SESSION_SECONDS = 14 * 24 * 3600
MAX_FORM_BYTES = 10_000
PAGE = Path(__file__).parents[1] / "pages" / "board" / "sign_in.html"
LOOPBACK = ("127.0.0.1", "::1")

WINDOW_SECONDS = 3600.0
FREE_BY_NAME = 5
FREE_BY_ADDRESS = 20
FIRST_WAIT_SECONDS = 0.5
LONGER_EACH_TIME = 1.1
MAX_WAIT_SECONDS = 30.0
AT_ONCE_BY_NAME = 5
AT_ONCE_BY_ADDRESS = 10
# One check takes 128 MB and a processor for half a second, which the board must not miss.
CHECKS_AT_ONCE = 1


class TooMany(Exception):
    """So many attempts for this name or from this address wait already that no more can."""


class SignInLimits:
    """How long an attempt to sign in waits, and how many may do so at once."""

    def __init__(self) -> None:
        self._attempts = Attempts(WINDOW_SECONDS)
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def attempt(self, address: str, name: str, now: float) -> Iterator[float]:
        """Count an attempt for as long as it runs; gives the seconds to wait before the check.

        The limit by name does not hold for an address that has not tried the name before, or
        strangers could keep somebody out by keeping it full.

        Raises:
            TooMany: from this address, or for this name.
        """
        by_address, by_name = f"address {address}", f"name {name}"
        is_first = not self._attempts.count((address, name), now)
        if self._waiting[by_address] >= AT_ONCE_BY_ADDRESS or (
            self._waiting[by_name] >= AT_ONCE_BY_NAME and not is_first
        ):
            raise TooMany
        self._attempts.add((address, name), now)
        beyond = max(
            self._attempts.add(by_address, now) - FREE_BY_ADDRESS,
            self._attempts.add(by_name, now) - FREE_BY_NAME,
        )
        self._waiting.update((by_address, by_name))
        try:
            yield _wait_seconds(beyond)
        finally:
            self._waiting.subtract((by_address, by_name))
            self._waiting = +self._waiting  # without those that have reached zero

    def was_right(self, address: str, name: str) -> None:
        """The attempt that was counted last brought the right password."""
        self._attempts.take_back(f"address {address}")
        self._attempts.forget(f"name {name}")
        self._attempts.forget((address, name))


def _wait_seconds(beyond: int) -> float:
    """The wait of an attempt with that many failures beyond the free ones before it."""
    if beyond < 0:
        return 0.0
    return min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * LONGER_EACH_TIME**beyond)


class SignInPage:
    """Signs people in and out.

    Args:
        users: who may sign in.
        secret: signs the cookies.
    """

    def __init__(self, users: Users, secret: str) -> None:
        self._users = users
        self._secret = secret
        self._limits = SignInLimits()
        # Of their own: attempts that wait for a thread must not take those of the board.
        self._threads = CapacityLimiter(CHECKS_AT_ONCE)

    async def answer(self, request: Request, user: User | None) -> Response:
        """Show the form, sign in with what it sent, or sign out `user`, who sends this."""
        if request.method in ("GET", "HEAD"):
            return sign_in_page()
        if request.method != "POST":
            return JSONResponse({"error": "Send the form."}, status_code=405)
        if request.scope["path"] == "/sign-in":
            return await self._sign_in(request)
        return await self._sign_out(user)

    async def _sign_in(self, request: Request) -> Response:
        try:
            body = await read_body(request, MAX_FORM_BYTES)
        except BodyError as error:
            return JSONResponse({"error": error.problem}, status_code=error.status)
        form = parse_qs(body.decode("utf-8", errors="replace"))
        name, password = form.get("name", [""])[0].strip(), form.get("password", [""])[0]
        try:
            outcome = await self._check(network_of(_address(request)), name, password)
        except TooMany:
            problem = "Too many sign-ins at once. Wait a few seconds and try again."
            page = sign_in_page(name, problem, status_code=429)
            page.headers["retry-after"] = "5"
            return page
        if outcome.user is None:
            return sign_in_page(name, outcome.problem, status_code=401)
        return self._signed_in(outcome.user, is_https=_is_https(request))

    async def _check(self, address: str, name: str, password: str) -> SignIn:
        with self._limits.attempt(address, name, time.monotonic()) as wait_seconds:
            await anyio.sleep(wait_seconds)
            outcome = await run_sync(self._users.sign_in, name, password, limiter=self._threads)
            if outcome.user is not None:
                self._limits.was_right(address, name)
        return outcome

    def _signed_in(self, user: User, *, is_https: bool) -> Response:
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            COOKIE,
            make_cookie(self._secret, user.name, user.epoch, time.time() + SESSION_SECONDS),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="lax",
            secure=is_https,
        )
        return answer

    async def _sign_out(self, user: User | None) -> Response:
        """End all sessions of `user`: a copy of the cookie is worth nothing then."""
        if user is not None:
            try:
                await run_sync(self._users.end_sessions, user.name)
            except sqlite3.OperationalError as error:
                problem = f"You are still signed in: the database could not write ({error})."
                return JSONResponse({"error": problem}, status_code=503)
        answer = RedirectResponse("/sign-in", status_code=303)
        answer.delete_cookie(COOKIE)
        return answer


def sign_in_page(name: str = "", problem: str = "", status_code: int = 200) -> HTMLResponse:
    """The sign-in form; it has no script at all."""
    page = PAGE.read_text(encoding="utf-8")
    page = page.replace("{{problem}}", escape(problem)).replace("{{name}}", escape(name))
    return html_page(page, status_code)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _is_https(request: Request) -> bool:
    """Whether the browser came over https; a proxy on this machine is believed that."""
    if request.url.scheme == "https":
        return True
    return (
        _address(request) in LOOPBACK
        and request.headers.get("x-forwarded-proto", "").strip() == "https"
    )
