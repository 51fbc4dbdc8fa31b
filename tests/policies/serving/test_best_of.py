"""Best of N without servers: what is asked, and what becomes of the other requests if one fails."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from policies.serving.errors import ApiError
from policies.serving.servers.best_of import BestOf
from reward.serving.batches import RequestCounts, SharedBatches
from rlhf.errors import InterruptedRunError
from tests.servers.coroutines import run_alone

HI = {"messages": [{"role": "user", "content": "Hi?"}]}


class Upstream:
    """Answers with letters, one more each time; the second of `failing` requests fails at once."""

    def __init__(self, *, failing: bool = False) -> None:
        self.failing = failing
        self.asked: list[dict[str, Any]] = []
        self.given_up = 0
        self.closed = False

    async def complete(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        number = len(self.asked)
        if self.failing and number == 2:
            raise ApiError(502, "no memory")
        try:
            await asyncio.sleep(60 * self.failing)
        except asyncio.CancelledError:
            self.given_up += not self.closed
            raise
        usage = {"prompt_tokens": 3, "completion_tokens": number, "total_tokens": 3 + number}
        return {"choices": [{"message": {"content": "a" * number}}], "usage": usage}


def by_length(answers: Any) -> list[float]:
    return [float(len(response.text)) for _, (response,) in answers]


def complete(
    upstream: Upstream,
    body: dict[str, Any],
    waiting: int = 8,
    score: Callable[[Any], list[float]] = by_length,
) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        best_of = BestOf(3, SharedBatches(score, RequestCounts(), waiting))
        async with httpx.AsyncClient() as client:
            try:
                return await best_of.complete(upstream, client, body)
            finally:
                await asyncio.sleep(0.01)
                upstream.closed = True  # what runs now is cancelled by `asyncio.run`

    return run_alone(run())


def test_the_best_of_three_has_the_tokens_of_all() -> None:
    upstream = Upstream()
    found = complete(upstream, {**HI, "stream_options": {"include_usage": True}})
    assert found["choices"][0]["message"]["content"] == "aaa"
    assert found["usage"] == {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    assert all("stream_options" not in one for one in upstream.asked)  # they are not streams


@pytest.mark.parametrize(("given", "used"), [({}, 1.0), ({"temperature": None}, 1.0),
                                             ({"temperature": 0.3}, 0.3)])  # fmt: skip
def test_responses_differ_unless_the_app_asks_for_less(given: dict, used: float) -> None:
    upstream = Upstream()
    complete(upstream, {**HI, **given})
    assert [one["temperature"] for one in upstream.asked] == [used] * 3


def test_if_one_fails_the_others_are_given_up() -> None:
    upstream = Upstream(failing=True)
    with pytest.raises(ApiError, match="no memory"):
        complete(upstream, HI)
    assert upstream.given_up == 2


@pytest.mark.parametrize(
    "message",
    [
        {"role": "cook", "content": "Hi?"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
    ],
)
def test_what_cannot_be_scored_is_explained_before_anything_is_sampled(message: dict) -> None:
    upstream = Upstream()
    with pytest.raises(ApiError, match="The responses cannot be scored") as caught:
        complete(upstream, {"messages": [message]})
    assert caught.value.status == 400
    assert upstream.asked == []


def test_a_prompt_may_come_in_parts_of_text() -> None:
    asked = []

    def keep(answers: Any) -> list[float]:
        asked.extend(prompt.messages[0].content for prompt, _ in answers)
        return [0.0 for _ in answers]

    parts = [{"type": "text", "text": text} for text in ("Hi?", "And you?")]
    complete(Upstream(), {"messages": [{"role": "user", "content": parts}]}, score=keep)
    assert set(asked) == {"Hi?\nAnd you?"}


def test_a_reward_server_that_is_away_is_not_the_fault_of_the_app() -> None:
    def absent(answers: Any) -> list[float]:
        raise InterruptedRunError("http://gpu does not answer after 5 attempts", "Start it.")

    with pytest.raises(ApiError, match=r"does not answer after 5 attempts\. Ask again") as caught:
        complete(Upstream(), HI, score=absent)
    assert caught.value.status == 503
