"""Best of N without servers: what is asked, and what becomes of the other requests if one fails."""

import asyncio
from typing import Any

import httpx
import pytest

from policies.serving.errors import ApiError
from policies.serving.servers.best_of import BestOf
from reward.serving.batches import Counts, SharedBatches
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


def complete(upstream: Upstream, body: dict[str, Any], waiting: int = 8) -> dict[str, Any]:
    def count(answers: Any) -> list[float]:
        return [float(len(response.text)) for _, (response,) in answers]

    async def run() -> dict[str, Any]:
        best_of = BestOf(3, SharedBatches(count, Counts(), waiting))
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


def test_what_cannot_be_scored_is_explained() -> None:
    with pytest.raises(ApiError, match="The responses cannot be scored") as caught:
        complete(Upstream(), {"messages": [{"role": "cook", "content": "Hi?"}]})
    assert caught.value.status == 400
