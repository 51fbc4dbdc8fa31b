"""Guesses are slowed down, and the right password always gets in."""

import asyncio
import threading
import time
from contextlib import ExitStack

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.responses import PlainTextResponse

from labeling_app.annotators import passwords as auth
from labeling_app.annotators.users import Users
from labeling_app.web.access.middleware import AuthMiddleware
from labeling_app.web.access.sign_in import SignInLimits, TooManyAttemptsError
from tests.labeling_app.conftest import run_async


@pytest.fixture
def limits():
    return SignInLimits()


def fail(limits: SignInLimits, address: str, name: str, times: int, now: float = 0.0) -> float:
    """That many wrong passwords, one after the other. Returns the wait before the last."""
    for _ in range(times):
        with limits.attempt(address, name, now) as wait_seconds:
            last = wait_seconds
    return last


def test_waits_grow_with_wrong_passwords_for_a_name_wherever_they_come_from(limits):
    assert fail(limits, "10.0.0.1", "ann", 5) == 0.0
    assert fail(limits, "10.0.0.1", "ann", 1) == 0.5
    assert fail(limits, "10.0.0.2", "ann", 1) == pytest.approx(0.55)
    assert fail(limits, "10.0.0.3", "bob", 1) == 0.0
    assert fail(limits, "10.0.0.1", "ann", 100) == 30.0
    assert fail(limits, "10.0.0.9", "ann", 1, now=3600.0) == 0.0  # an hour later


def test_waits_grow_with_wrong_passwords_from_an_address_whatever_the_name(limits):
    waits = [fail(limits, "10.0.0.1", f"name {n}", 1) for n in range(22)]
    assert waits[:20] == [0.0] * 20
    assert waits[20:] == [0.5, pytest.approx(0.55)]


def test_a_right_password_makes_the_name_free_and_leaves_the_address(limits):
    fail(limits, "10.0.0.1", "bob", 20)
    with limits.attempt("10.0.0.1", "ann", 0.0) as wait_seconds:
        assert wait_seconds == 0.5
        limits.was_right("10.0.0.1", "ann")
    assert fail(limits, "10.0.0.1", "ann", 1) == 0.5
    assert fail(limits, "10.0.0.2", "ann", 3) == 0.0


def test_only_so_many_wait_at_once(limits):
    with ExitStack() as waiting:
        for _ in range(5):
            waiting.enter_context(limits.attempt("10.0.0.1", "ann", 0.0))
        with pytest.raises(TooManyAttemptsError), limits.attempt("10.0.0.1", "ann", 0.0):
            """Refused."""
        # An address that has not tried the name is not kept out by those that fill it.
        waiting.enter_context(limits.attempt("10.0.0.2", "ann", 0.0))
        for n in range(5):
            waiting.enter_context(limits.attempt("10.0.0.1", f"name {n}", 0.0))
        with pytest.raises(TooManyAttemptsError), limits.attempt("10.0.0.1", "bob", 0.0):
            """Ten from one address are all that wait."""
    assert fail(limits, "10.0.0.1", "bob", 1) == 0.0
    assert limits._waiting == {}


def make_app(store) -> AuthMiddleware:
    users = Users(store)
    users.add("ann", "annotator", "long enough")
    return AuthMiddleware(
        PlainTextResponse("board"), find_user=lambda request: None, users=users, secret="s"
    )


def client_of(app: AuthMiddleware, address: str = "10.0.0.1") -> AsyncClient:
    transport = ASGITransport(app, client=(address, 50000))
    return AsyncClient(transport=transport, base_url="http://label", timeout=30)


async def sign_in(client: AsyncClient, name: str, password: str) -> tuple[int, str]:
    form = {"name": name, "password": password}
    answer = await client.post("/sign-in", data=form)
    return answer.status_code, answer.text.partition('role="alert">')[2].partition("</p>")[0]


def test_forty_wrong_passwords_at_once_are_five_and_the_right_one_gets_in_after_them(store):
    async def attack(name: str) -> tuple[list[tuple[int, str]], tuple[int, str]]:
        async with client_of(app_of[name]) as client:
            wrong = await asyncio.gather(*(sign_in(client, name, f"guess {n}") for n in range(40)))
            return sorted(wrong), await sign_in(client, name, "long enough")

    app = make_app(store)
    app_of = {"ann": app, "nobody": app}
    answers, last = run_async(attack("ann"))
    wrong = (401, "Name or password is wrong.")
    too_many = (429, "Too many sign-ins at once. Wait a few seconds and try again.")
    assert answers == [wrong] * 5 + [too_many] * 35
    assert last[0] == 303
    # A name that nobody has is answered in the same way.
    answers, last = run_async(attack("nobody"))
    assert answers == [wrong] * 5 + [too_many] * 35
    assert last == wrong


def test_a_flood_from_one_address_does_not_keep_out_somebody_at_another(store):
    app = make_app(store)

    async def attack() -> tuple[int, str]:
        async with client_of(app) as flood, client_of(app, "10.0.0.2") as ann:
            wrong = [asyncio.create_task(sign_in(flood, "ann", "guess")) for _ in range(200)]
            answer = await sign_in(ann, "ann", "long enough")
            await asyncio.gather(*wrong)
            return answer

    assert run_async(attack())[0] == 303


def test_checks_use_one_thread_of_their_own_and_leave_the_rest_to_the_board(store, monkeypatch):
    # As slow as the real cost on a slow machine; what is hashed does not matter here.
    running, most = 0, 0
    lock = threading.Lock()
    real = auth.hashlib.scrypt

    def slowly(*arguments, **cost):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return real(*arguments, **cost)

    app = make_app(store)
    monkeypatch.setattr(auth.hashlib, "scrypt", slowly)

    async def attack() -> int:
        async with client_of(app) as flood:
            names = [f"name {n}" for n in range(60)]
            wrong = [asyncio.create_task(sign_in(flood, name, "guess")) for name in names]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(lambda: None)
            still_waiting = sum(not one.done() for one in wrong)
            await asyncio.gather(*wrong)
            return still_waiting

    assert run_async(attack()) > 0
    assert most == 1
