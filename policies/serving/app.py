"""The routes of `rlhf serve --policy`: OpenAI's, feedback, comparison, health and metrics."""

import asyncio
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from policies.serving.access import Access
from policies.serving.errors import UNAVAILABLE, ApiError
from policies.serving.metrics import write_metrics
from policies.serving.proxy import MODEL, Proxy
from policies.serving.retention import Records
from policies.serving.servers.upstream import new_client
from policies.serving.thumbs.comparison import compare_thumbs
from rlhf.endpoints.request_bodies import BodyError, read_json
from rlhf.errors import InputError
from rlhf.records.served import NotKeptError

MAX_CHAT_BYTES = 2**23
MAX_FEEDBACK_BYTES = 1_000_000
DAY_SECONDS = 86_400.0
FORGET_EVERY_SECONDS = 3_600.0
WATCH_SECONDS = 1.0

Handler = Callable[[Request], Awaitable[Response]]


class Restartable(Protocol):
    """A server that this process has started."""

    def restart_if_dead(self) -> None:
        """Start it again if it has ended."""


class Follower(Protocol):
    """Changes a policy of the proxy while it serves."""

    async def follow(self, proxy: Proxy) -> None:
        """Do it until it is cancelled."""


def build_app(
    proxy: Proxy,
    access: Access,
    engines: Sequence[Restartable] = (),
    followers: Sequence[Follower] = (),
) -> Starlette:
    """The web application.

    Args:
        proxy: answers chat completions.
        access: who may use it.
        engines: servers that are started again if they end.
        followers: change a policy while it is served.
    """
    began = time.time()

    async def chat(request: Request, program: str) -> Response:
        return await proxy.complete(await read_json(request, MAX_CHAT_BYTES))

    async def models(request: Request, program: str) -> Response:
        model = {"id": MODEL, "object": "model", "created": int(began), "owned_by": "rlhf"}
        return JSONResponse({"object": "list", "data": [model]})

    async def feedback(request: Request, program: str) -> Response:
        payload = await read_json(request, MAX_FEEDBACK_BYTES)
        retention = proxy.policies.retention
        if retention is None:
            raise ApiError(404, "Nothing is kept: start rlhf serve with --db.")
        is_new = await retention.records.add_feedback(program, retention.clean_feedback(payload))
        proxy.counts.feedback += is_new
        return JSONResponse({"stored": is_new}, 201 if is_new else 200)

    async def comparison(request: Request, program: str) -> Response:
        report = await compare(proxy)
        if report is None:
            raise ApiError(404, "Nothing is compared: start rlhf serve with --against and --db.")
        return JSONResponse(report)

    async def metrics(request: Request, program: str) -> Response:
        report = await compare(proxy)
        return PlainTextResponse(write_metrics(proxy.counts, report))

    async def health(request: Request) -> Response:
        return _health(await _problems(proxy), time.time() - began)

    def guarded(handle: Callable[[Request, str], Awaitable[Response]]) -> Handler:
        return _as_endpoint(access, handle)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/feedback", guarded(feedback), methods=["POST"]),
            Route("/comparison", guarded(comparison)),
            Route("/metrics", guarded(metrics)),
            Route("/health", health),
        ],
        lifespan=_lifespan(proxy, engines, followers),
        exception_handlers={404: _unknown_route, 405: _unknown_route},
    )


async def _problems(proxy: Proxy) -> dict[str, str]:
    """Why each policy cannot answer; empty if it can."""
    policies = proxy.policies.by_variant
    problems = (policy.upstream.problem(proxy.client) for policy in policies.values())
    return dict(zip(policies, await asyncio.gather(*problems), strict=True))


def _health(problems: dict[str, str], uptime_seconds: float) -> JSONResponse:
    """The health of every policy, as a response."""
    is_failed = any(problems.values())
    shown = {name: problem or "ready" for name, problem in problems.items()}
    body = {"status": "failed" if is_failed else "ready", "models": shown}
    uptime = {"uptime_seconds": round(uptime_seconds, 3)}
    return JSONResponse(body | uptime, 503 if is_failed else 200)


async def compare(proxy: Proxy) -> dict[str, Any] | None:
    """The comparison by the thumbs so far; None where nothing is compared."""
    retention = proxy.policies.retention
    if retention is None or retention.comparison is None:
        return None
    compared = compare_thumbs(await retention.records.count_thumbs(retention.comparison))
    for variant, policy in proxy.policies.by_variant.items():
        compared[variant]["name"] = policy.description["path"]
    return compared


def _as_endpoint(access: Access, handle: Callable[[Request, str], Awaitable[Response]]) -> Handler:
    """Check who asks, and turn failures into OpenAI's errors."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request, await access.program(request))
        except ApiError as error:
            return error.to_response()
        except BodyError as error:
            return ApiError(error.status, error.problem).to_response()
        except InputError as error:
            status = 404 if isinstance(error, NotKeptError) else 400
            return ApiError(status, f"{error.problem}. {error.remedy}").to_response()
        except sqlite3.Error as error:
            problem = f"The database cannot be used ({error}). Send it again later."
            return ApiError(503, problem, UNAVAILABLE).to_response()

    return endpoint


def _unknown_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    problem = f"There is no {request.method} {request.url.path} here."
    return ApiError(status, problem, code="unknown_url").to_response()


def _lifespan(
    proxy: Proxy, engines: Sequence[Restartable], followers: Sequence[Follower]
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def live(app: Starlette) -> AsyncIterator[None]:
        async with new_client(proxy.silence_seconds) as proxy.client:
            retention = proxy.policies.retention
            lasting = [_watch(engines), *(follower.follow(proxy) for follower in followers)]
            if retention is not None and retention.days is not None:
                lasting.append(_forget(retention.records, retention.days))
            tasks = [asyncio.create_task(coroutine) for coroutine in lasting]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return live


async def _watch(engines: Sequence[Restartable]) -> None:
    """Start servers again that have ended."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        for engine in engines:
            try:
                engine.restart_if_dead()
            except OSError as error:  # no memory or processes are left: try again
                sys.stderr.write(f"A model server could not be started ({error}).\n")


async def _forget(records: Records, days: int) -> None:
    """Delete old responses, every hour."""
    while True:
        try:
            await records.forget(time.time() - days * DAY_SECONDS)
        except sqlite3.Error as error:
            sys.stderr.write(f"Old responses could not be deleted ({error}).\n")
        await asyncio.sleep(FORGET_EVERY_SECONDS)
