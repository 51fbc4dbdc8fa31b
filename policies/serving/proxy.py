"""Chat completions: choose a policy, pass the request on, keep the response, pass it back.

A streamed response is passed on event by event. Its end, `data: [DONE]`, is sent once it is kept:
an app that has seen the end may send feedback on it, even if the server is killed right after.
If the database fails, an error event takes the place of the end, and a response that is not
streamed has the header `x-rlhf-kept: false`: the app gets the text and can tell that it was not
kept. The status stays 200, because clients ask again after a 5xx: with a full disk they would pay
for the same response three times.
"""

import asyncio
import sqlite3
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import httpx
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from policies.serving.errors import UNAVAILABLE, UPSTREAM, ApiError
from policies.serving.retention import ChatRequest, Retention, served_response
from policies.serving.servers.events import (
    DONE,
    BrokenStreamError,
    Completion,
    EventReader,
    completion_events,
    event_of,
    read_completion,
)
from policies.serving.servers.upstream import Upstream, describe, unusable
from policies.serving.split import Split
from rlhf.errors import InputError
from rlhf.records.served import Variant

if TYPE_CHECKING:
    from policies.serving.servers.best_of import BestOf  # imports torch

MODEL = "policy"  # the name that apps see, whichever policy responds
MAX_RUNNING = 512
EVENT_STREAM = "text/event-stream; charset=utf-8"
NOT_KEPT = {"x-rlhf-kept": "false"}


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """A policy and the server that runs it.

    Attributes:
        description: its name or path, and its hash where known.
        upstream: its server.
        running: ids of the requests that it is answering.
    """

    description: Mapping[str, str]
    upstream: Upstream
    running: set[str] = field(default_factory=set, compare=False)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The policies that serve, and which responses are kept.

    A request stays with the policies that it began with.

    Attributes:
        by_variant: the policies; `against` only in a comparison.
        split: draws the policy of a conversation.
        retention: which responses are kept; None keeps nothing.
    """

    by_variant: Mapping[Variant, ServedPolicy]
    split: Split
    retention: Retention | None


@dataclass
class ProxyCounts:
    """Counts since the start; `requests` and `tokens` by policy."""

    requests: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    kept: int = 0
    not_kept: int = 0
    """Responses that could not be kept, because of the database or the redaction."""
    feedback: int = 0
    running: int = 0


@final
class Proxy:
    """Answers chat completions.

    Args:
        policies: those that are served.
        best_of: None returns the first response.
        silence_seconds: how long a server may send nothing.
    """

    def __init__(
        self, policies: Policies, best_of: "BestOf | None", silence_seconds: float
    ) -> None:
        self.policies = policies
        self.changing = asyncio.Lock()  # while a follower prepares to change a policy
        variants = policies.by_variant
        self.counts = ProxyCounts(dict.fromkeys(variants, 0), dict.fromkeys(variants, 0))
        self._best_of = best_of
        self.silence_seconds = silence_seconds
        self.client: httpx.AsyncClient

    async def complete(self, body: dict[str, Any]) -> Response:
        """Answer a request.

        Raises:
            ApiError: it is wrong, or the server behind fails.
        """
        _require_valid(body)
        if self.counts.running >= MAX_RUNNING:
            problem = f"{MAX_RUNNING} requests are being answered. Ask again."
            raise ApiError(503, problem, UNAVAILABLE, headers={"retry-after": "1"})
        new_id, policies = f"chatcmpl-{uuid.uuid4().hex}", self.policies
        drawn = policies.split.draw(new_id, body["messages"])
        request = ChatRequest(id=new_id, body=body, conversation=drawn)
        self.counts.requests[drawn.variant] += 1
        self.counts.running += 1
        policies.by_variant[drawn.variant].running.add(new_id)
        is_open = False
        try:
            response = await self._respond(request, policies)
            is_open = isinstance(response, _EventStream)
            return response
        except ApiError:
            self.counts.failures += 1
            raise
        finally:
            if not is_open:
                self._end(request, policies)

    def _end(self, request: ChatRequest, policies: Policies) -> None:
        """A request was answered, or has failed."""
        self.counts.running -= 1
        policies.by_variant[request.conversation.variant].running.discard(request.id)

    def change(self, variant: Variant, policy: ServedPolicy, comparison: int | None) -> None:
        """Serve another policy from now on; requests under way stay with theirs.

        Conversations are drawn anew, as after a restart: a thumb on what both policies have said
        would be no evidence on either.

        Args:
            variant: whose place it takes.
            policy: the new policy.
            comparison: the number of the comparison from now on, if there is one.
        """
        now = self.policies
        retention = now.retention and replace(now.retention, comparison=comparison)
        by_variant = {**now.by_variant, variant: policy}
        self.policies = Policies(
            by_variant=by_variant, split=now.split.renewed(), retention=retention
        )

    async def _respond(self, request: ChatRequest, policies: Policies) -> Response:
        upstream = policies.by_variant[request.conversation.variant].upstream
        sent = {name: value for name, value in request.body.items() if name != "n"}
        if self._best_of is None and request.body.get("stream"):
            opened = await upstream.start_completion(self.client, sent)
            if opened.headers.get("content-type", "").startswith("text/event-stream"):
                events = self._events(request, policies, opened)
                return _EventStream(events, opened, lambda: self._end(request, policies))
            await opened.aclose()
            raise unusable("it does not stream")
        if self._best_of is None:
            body = await upstream.complete(self.client, sent)
        else:
            body = await self._best_of.complete(upstream, self.client, sent)
        try:
            completion = read_completion(body)
        except BrokenStreamError as error:
            raise unusable(str(error)) from None
        body = {**body, **_names(request)}
        failure = await self._finish(request, policies, completion)
        if not request.body.get("stream"):
            return JSONResponse(body, headers=NOT_KEPT if failure else None)
        whole = b"".join([*completion_events(body), _last_event(failure)])
        return Response(whole, media_type=EVENT_STREAM)

    async def _events(
        self, request: ChatRequest, policies: Policies, opened: httpx.Response
    ) -> AsyncIterator[bytes]:
        """The events of a stream, as they arrive."""
        reader = EventReader(_names(request))
        try:
            async for content in opened.aiter_bytes():
                if events := reader.feed(content):
                    yield events
            reader.close()
        except (httpx.HTTPError, BrokenStreamError) as error:
            self.counts.failures += 1
            reason = describe(error) if isinstance(error, httpx.HTTPError) else str(error)
            problem = f"The model server ended its answer early: {reason}"
            yield event_of(ApiError(502, problem, UPSTREAM).body)
            return
        yield _last_event(await self._finish(request, policies, reader.completion))

    async def _finish(
        self, request: ChatRequest, policies: Policies, completion: Completion
    ) -> ApiError | None:
        """Count a completion, remember it for the conversation's next request, and keep it.

        Returns:
            Why the database could not keep it; None otherwise. A response that the redaction
            cannot handle is not kept, and the app still gets it.
        """
        variant = request.conversation.variant
        self.counts.tokens[variant] += completion.completion_tokens
        policies.split.remember(request.conversation, request.messages, completion.text)
        retention = policies.retention
        if retention is None or not retention.keeps(request.conversation):
            return None
        try:
            response = served_response(
                retention, request, completion, policies.by_variant[variant].description
            )
            if response is not None:
                await retention.records.keep(response)
                self.counts.kept += 1
        except sqlite3.Error as error:
            self._count_not_kept(error)
            problem = f"The response is complete, and could not be kept ({error}): it takes no "
            return ApiError(503, f"{problem}feedback.", UNAVAILABLE, code="not_kept")
        except InputError as error:
            self._count_not_kept(error)
        return None

    def _count_not_kept(self, error: Exception) -> None:
        self.counts.not_kept += 1
        if self.counts.not_kept == 1:
            sys.stderr.write(f"A response could not be kept: {error}\n")


class _EventStream(StreamingResponse):
    """A stream that closes its connection to the server even if the app disconnects at once."""

    def __init__(
        self, events: AsyncIterator[bytes], opened: httpx.Response, end: Callable[[], None]
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type=EVENT_STREAM, headers=headers)
        self._opened = opened
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
            await self._opened.aclose()


def _last_event(failure: ApiError | None) -> bytes:
    """The last event of a stream."""
    return DONE if failure is None else event_of(failure.body)


def _names(request: ChatRequest) -> dict[str, str]:
    """The id and name of the model in place of the server's own."""
    return {"id": request.id, "model": MODEL}


def _require_valid(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of messages that is not empty.")
    if not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise ApiError(400, "Every message must be an object with a role.")
    if body.get("n", 1) not in (1, None):
        raise ApiError(400, f"n is {body['n']!r:.40}. Send one request for each response.")
    if not isinstance(body.get("stream", False), bool | None):
        raise ApiError(400, "stream must be true or false.")
    if body.get("model") != MODEL:
        raise ApiError(
            404,
            f"There is no model {body.get('model')!r:.80}. Send model={MODEL!r}.",
            code="model_not_found",
        )
