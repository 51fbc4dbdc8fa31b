"""Chat completions: choose a policy, pass the request on, keep the answer, pass it back.

A streamed answer is passed on event by event. Its end, `data: [DONE]`, is sent once it is kept: an
app that has seen the end may send feedback on it, also after the server was killed. Where the
database fails, an error event takes the place of the end, and an answer that is not streamed has
the header `x-rlhf-kept: false`: the app has its text all the same, and can tell. The status stays
200, because clients ask again after a 5xx, and a full disk would only cost the same answer thrice.
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
from policies.serving.keeping import Asked, Keeping, served_response
from policies.serving.servers.events import (
    DONE,
    Answer,
    BrokenStreamError,
    EventReader,
    answer_of,
    as_events,
    event_of,
)
from policies.serving.servers.upstream import Upstream, describe, unusable
from policies.serving.split import Split
from rlhf.errors import InputError
from rlhf.records.served import Variant

if TYPE_CHECKING:
    from policies.serving.servers.best_of import BestOf  # imports torch

MODEL = "policy"  # the name that apps see, whoever answers
MAX_RUNNING = 512
EVENT_STREAM = "text/event-stream; charset=utf-8"
NOT_KEPT = {"x-rlhf-kept": "false"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One policy: how it is called, its path and hash where known, and its server.

    `running` are the ids of the requests that it is answering.
    """

    description: Mapping[str, str]
    upstream: Upstream
    running: set[str] = field(default_factory=set, compare=False)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Who answers, and what is kept of it; a request stays with those that it began with.

    `sides` has `against` only in a comparison; a `keeping` of None keeps nothing.
    """

    sides: Mapping[Variant, Side]
    split: Split
    keeping: Keeping | None


@dataclass
class Counts:
    """What was served since the start; `requests` and `tokens` by policy."""

    requests: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    kept: int = 0
    not_kept: int = 0
    """Answers that could not be kept, because of the database or the redaction."""
    feedback: int = 0
    running: int = 0


@final
class Proxy:
    """Answers chat completions.

    Args:
        policies: who answers.
        best_of: None returns the first response.
        silence_seconds: how long a server may send nothing.
    """

    def __init__(
        self, policies: Policies, best_of: "BestOf | None", silence_seconds: float
    ) -> None:
        self.policies = policies
        self.changing = asyncio.Lock()  # while a follower prepares to change a policy
        sides = policies.sides
        self.counts = Counts(dict.fromkeys(sides, 0), dict.fromkeys(sides, 0))
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
        asked = Asked(id=new_id, body=body, conversation=drawn)
        self.counts.requests[drawn.variant] += 1
        self.counts.running += 1
        policies.sides[drawn.variant].running.add(new_id)
        is_open = False
        try:
            answer = await self._answer(asked, policies)
            is_open = isinstance(answer, _EventStream)
            return answer
        except ApiError:
            self.counts.failures += 1
            raise
        finally:
            if not is_open:
                self._end(asked, policies)

    def _end(self, asked: Asked, policies: Policies) -> None:
        """A request was answered, or has failed."""
        self.counts.running -= 1
        policies.sides[asked.conversation.variant].running.discard(asked.id)

    def change(self, variant: Variant, side: Side, comparison: int | None) -> None:
        """Let another policy answer from now on; requests under way stay with theirs.

        Conversations are drawn anew, as after a restart: a thumb on what both policies have said
        would be no evidence on either.

        Args:
            variant: in whose place it answers.
            side: the policy.
            comparison: the number of the comparison from now on, if there is one.
        """
        now = self.policies
        keeping = now.keeping and replace(now.keeping, comparison=comparison)
        sides = {**now.sides, variant: side}
        self.policies = Policies(sides=sides, split=now.split.renewed(), keeping=keeping)

    async def _answer(self, asked: Asked, policies: Policies) -> Response:
        upstream = policies.sides[asked.conversation.variant].upstream
        sent = {name: value for name, value in asked.body.items() if name != "n"}
        if self._best_of is None and asked.body.get("stream"):
            opened = await upstream.open(self.client, sent)
            if opened.headers.get("content-type", "").startswith("text/event-stream"):
                events = self._events(asked, policies, opened)
                return _EventStream(events, opened, lambda: self._end(asked, policies))
            await opened.aclose()
            raise unusable("it does not stream")
        if self._best_of is None:
            completion = await upstream.complete(self.client, sent)
        else:
            completion = await self._best_of.complete(upstream, self.client, sent)
        try:
            answer = answer_of(completion)
        except BrokenStreamError as error:
            raise unusable(str(error)) from None
        completion = {**completion, **_names(asked)}
        failure = await self._finish(asked, policies, answer)
        if not asked.body.get("stream"):
            return JSONResponse(completion, headers=NOT_KEPT if failure else None)
        whole = b"".join([*as_events(completion), _last_event(failure)])
        return Response(whole, media_type=EVENT_STREAM)

    async def _events(
        self, asked: Asked, policies: Policies, opened: httpx.Response
    ) -> AsyncIterator[bytes]:
        """The events of a stream, as they arrive."""
        reader = EventReader(_names(asked))
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
        yield _last_event(await self._finish(asked, policies, reader.answer))

    async def _finish(self, asked: Asked, policies: Policies, answer: Answer) -> ApiError | None:
        """Count an answer, recognize what follows it, and keep it.

        Returns:
            Why the database could not keep it; None otherwise. What the redaction fails on is like
            what nobody could judge: it is not kept, and the answer is as good.
        """
        variant = asked.conversation.variant
        self.counts.tokens[variant] += answer.completion_tokens
        policies.split.remember(asked.conversation, asked.messages, answer.text)
        keeping = policies.keeping
        if keeping is None or not keeping.keeps(asked.conversation):
            return None
        try:
            kept = served_response(keeping, asked, answer, policies.sides[variant].description)
            if kept is not None:
                await keeping.records.keep(kept)
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
    """A stream that closes its connection to the server also if the app leaves at once."""

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


def _names(asked: Asked) -> dict[str, str]:
    """What replaces the server's own id and name of the model."""
    return {"id": asked.id, "model": MODEL}


def _require_valid(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of messages that is not empty.")
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
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
