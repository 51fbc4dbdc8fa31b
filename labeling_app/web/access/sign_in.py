"""`/sign-in`, `/sign-out` and `/password`: the forms, their limits, the cookie.

Guessing is slowed down without locking anybody out. After a few wrong passwords for a name or from
an address, each further attempt waits longer before it is checked, and only a few may wait at once.
The right password works after that wait. Names without an account are treated the same.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

import anyio
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from jinja2 import Environment, FileSystemLoader
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from labeling_app.annotators.users import SignIn, User, Users, require_password
from labeling_app.web.access.attempts import Attempts, network_of
from labeling_app.web.access.content_policy import html_page
from labeling_app.web.access.cookies import SESSION_SECONDS, make_cookie
from labeling_app.web.health import unusable_database
from labeling_app.web.request_bodies import error_reply
from rlhf.endpoints.request_bodies import BodyError, read_body
from rlhf.endpoints.urls import LOOPBACK
from rlhf.errors import InputError

SIGN_IN_PATHS = ("/sign-in", "/sign-out")
PASSWORD_PATH = "/password"
COOKIE = "rlhf_session"
MAX_FORM_BYTES = 10_000
PAGES = Path(__file__).parents[1] / "pages"
TEMPLATES = Environment(loader=FileSystemLoader(PAGES), autoescape=True)

FindUser = Callable[[Request], User | None]

WINDOW_SECONDS = 3600.0
FREE_ATTEMPTS_PER_NAME = 5
FREE_ATTEMPTS_PER_ADDRESS = 20
FIRST_WAIT_SECONDS = 0.5
WAIT_GROWTH = 1.1
MAX_WAIT_SECONDS = 30.0
MAX_WAITING_PER_NAME = 5
MAX_WAITING_PER_ADDRESS = 10
# One check takes 128 MB and half a second of a processor; more at once would slow the board.
MAX_CONCURRENT_CHECKS = 1
TOO_MANY = "Too many sign-ins at once. Wait a few seconds and try again."


class TooManyAttemptsError(Exception):
    """Too many attempts for this name or from this address are waiting already."""


class SignInLimits:
    """How long an attempt to sign in waits, and how many may wait at once."""

    def __init__(self) -> None:
        self._attempts = Attempts(WINDOW_SECONDS)
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def attempt(self, address: str, name: str, now: float) -> Iterator[float]:
        """Count an attempt while it runs; yields the seconds to wait before the check.

        An address that has not tried the name before is exempt from the limit by name: otherwise
        strangers could lock somebody out by using it up.

        Raises:
            TooManyAttemptsError: too many are waiting from this address, or for this name.
        """
        by_address, by_name = f"address {address}", f"name {name}"
        is_first = not self._attempts.count((address, name), now)
        if self._waiting[by_address] >= MAX_WAITING_PER_ADDRESS or (
            self._waiting[by_name] >= MAX_WAITING_PER_NAME and not is_first
        ):
            raise TooManyAttemptsError
        self._attempts.add((address, name), now)
        beyond = max(
            self._attempts.add(by_address, now) - FREE_ATTEMPTS_PER_ADDRESS,
            self._attempts.add(by_name, now) - FREE_ATTEMPTS_PER_NAME,
        )
        self._waiting.update((by_address, by_name))
        try:
            yield _wait_seconds(beyond)
        finally:
            self._waiting.subtract((by_address, by_name))
            self._waiting = +self._waiting  # without those that have reached zero

    def was_right(self, address: str, name: str) -> None:
        """Forget the failures of a name: its last attempt had the right password."""
        self._attempts.take_back(f"address {address}")
        self._attempts.forget(f"name {name}")
        self._attempts.forget((address, name))


def _wait_seconds(beyond: int) -> float:
    """The wait after this many failures more than the free ones."""
    if beyond < 0:
        return 0.0
    return min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * WAIT_GROWTH**beyond)


class SignInPage:
    """Signs people in and out, and lets them change their password.

    Args:
        users: who may sign in.
        secret: signs the cookies.
        find_user: the user who sends a request; None if not signed in.
    """

    def __init__(self, users: Users, secret: str, find_user: FindUser) -> None:
        self._users = users
        self._find_user = find_user
        self._secret = secret
        self._limits = SignInLimits()
        # Separate threads: attempts that wait must not use up those of the board.
        self._threads = CapacityLimiter(MAX_CONCURRENT_CHECKS)

    async def answer(self, request: Request) -> Response:
        """Show the form, sign somebody in, or sign out whoever sent the request."""
        if request.method in ("GET", "HEAD"):
            return sign_in_page()
        if request.method != "POST":
            return JSONResponse(
                {"error": "Sign in with the form: open /sign-in in a browser."}, status_code=405
            )
        if request.scope["path"] == "/sign-in":
            return await self._sign_in(request)
        return await self._sign_out(self._find_user(request))

    async def _sign_in(self, request: Request) -> Response:
        try:
            form = await _read_form(request)
        except BodyError as error:
            return error_reply(error)
        name, password = form.get("name", "").strip(), form.get("password", "")
        outcome, status_code = await self._check(request, name, self._users.sign_in, password)
        if outcome.user is None:
            return sign_in_page(name, outcome.problem, status_code)
        answer = RedirectResponse("/", status_code=303)
        self._set_cookie(answer, outcome.user, request)
        return answer

    async def change_password(self, request: Request, user: User) -> Response:
        """Show the form, or change the password: other sessions end, the sender's goes on.

        Args:
            request: GET, HEAD or POST.
            user: who sends it.
        """
        if request.method in ("GET", "HEAD"):
            return password_page(user.name)
        if request.method != "POST":
            return JSONResponse({"error": "Open /password in a browser."}, status_code=405)
        try:
            form = await _read_form(request)
            old, new = form.get("old", ""), form.get("new", "")
            require_password(new)  # before the attempt is counted
        except BodyError as error:
            return error_reply(error)
        except InputError as error:
            return password_page(user.name, f"{error.problem}. {error.remedy}", 400)
        change = self._users.change_password
        outcome, status_code = await self._check(request, user.name, change, old, new)
        if outcome.user is None:
            return password_page(user.name, outcome.problem, status_code)
        answer = password_page(user.name, is_changed=True)
        self._set_cookie(answer, outcome.user, request)
        return answer

    async def _check(
        self, request: Request, name: str, check: Callable[..., SignIn], *passwords: str
    ) -> tuple[SignIn, int]:
        """Check a password as the limits allow: the outcome, and the status of a refusal."""
        address = network_of(_address(request))
        try:
            with self._limits.attempt(address, name, time.monotonic()) as wait_seconds:
                await anyio.sleep(wait_seconds)
                outcome = await run_sync(check, name, *passwords, limiter=self._threads)
                if outcome.user is not None:
                    self._limits.was_right(address, name)
            return outcome, 401
        except TooManyAttemptsError:
            return SignIn(problem=TOO_MANY), 429
        except sqlite3.DatabaseError as error:
            return SignIn(problem=unusable_database(error)), 503

    def _set_cookie(self, answer: Response, user: User, request: Request) -> None:
        answer.set_cookie(
            COOKIE,
            make_cookie(self._secret, user.name, user.epoch),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="lax",
            secure=_is_https(request),
        )

    async def _sign_out(self, user: User | None) -> Response:
        """End all sessions of `user`, so that no copy of the cookie works any longer."""
        if user is not None:
            try:
                await run_sync(self._users.end_sessions, user.name)
            except sqlite3.OperationalError as error:
                problem = (
                    f"You are still signed in: the database could not write ({error}). "
                    "Try again later."
                )
                return JSONResponse({"error": problem}, status_code=503)
        answer = RedirectResponse("/sign-in", status_code=303)
        answer.delete_cookie(COOKIE)
        return answer


def sign_in_page(name: str = "", problem: str = "", status_code: int = 200) -> HTMLResponse:
    """The sign-in form; it needs no script."""
    return _page("board/sign_in.html", status_code, name=name, problem=problem)


def password_page(
    name: str, problem: str = "", status_code: int = 200, *, is_changed: bool = False
) -> HTMLResponse:
    """The form for a new password, or that it is changed; it needs no script."""
    return _page(
        "board/password.html", status_code, name=name, problem=problem, is_changed=is_changed
    )


def _page(template: str, status_code: int, **values: str | bool) -> HTMLResponse:
    answer = html_page(TEMPLATES.get_template(template).render(values), status_code)
    if status_code == 429:
        answer.headers["retry-after"] = "5"
    return answer


async def _read_form(request: Request) -> dict[str, str]:
    """The fields of a form, each with its first value.

    Raises:
        BodyError: it is too large, or ended early.
    """
    body = await read_body(request, MAX_FORM_BYTES)
    fields = parse_qs(body.decode("utf-8", errors="replace"))
    return {name: values[0] for name, values in fields.items()}


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _is_https(request: Request) -> bool:
    """Whether the browser used https; a proxy on this machine may say so in a header."""
    if request.url.scheme == "https":
        return True
    return (
        _address(request) in LOOPBACK
        and request.headers.get("x-forwarded-proto", "").strip() == "https"
    )
