"""Best of N: sample several responses and return the one with the highest reward."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from policies.serving.errors import UNAVAILABLE, ApiError
from policies.serving.servers.events import BrokenStreamError, read_completion
from policies.serving.servers.upstream import Upstream, unusable
from reward.serving.batches import QueueFullError, SharedBatches
from rlhf.endpoints.chat_completions import read_messages
from rlhf.errors import InputError, InterruptedRunError, RlhfError
from rlhf.records.schema import Prompt, Response

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
TEMPERATURE = 1.0  # servers may decode greedily by default, N times the same response


@dataclass(frozen=True)
class BestOf:
    """How many responses are sampled, and what scores them."""

    number: int
    batches: SharedBatches

    async def complete(
        self, upstream: Upstream, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> dict[str, Any]:
        """The completion with the highest reward; its usage is that of all of them.

        Raises:
            ApiError: the server fails, or the responses cannot be scored.
        """
        prompt = _prompt(body["messages"])
        wanted = {name: value for name, value in body.items() if name != "stream_options"}
        if wanted.get("temperature") is None:
            wanted["temperature"] = TEMPERATURE
        seeds = [
            {"seed": wanted["seed"] + index} if isinstance(wanted.get("seed"), int) else {}
            for index in range(self.number)
        ]
        tasks = [
            asyncio.create_task(upstream.complete(client, {**wanted, **seed})) for seed in seeds
        ]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # if one has failed
        try:
            texts = [read_completion(completion).text for completion in completions]
        except BrokenStreamError as error:
            raise unusable(str(error)) from None
        rewards = await self._score(prompt, texts)
        best = max(range(self.number), key=rewards.__getitem__)
        return {
            **completions[best],
            "usage": _sum_of([completion.get("usage") for completion in completions]),
        }

    async def _score(self, prompt: Prompt, texts: list[str]) -> list[float]:
        try:
            responses = [Response(id="", prompt_id=prompt.id, text=t, model="") for t in texts]
            return await self.batches.rewards([(prompt, (response,)) for response in responses])
        except QueueFullError:
            headers = {"retry-after": "1"}
            problem = "Too many responses wait for their reward. Ask again."
            raise ApiError(503, problem, UNAVAILABLE, headers=headers) from None
        except InterruptedRunError as error:  # the server of the reward is away
            problem = f"The responses have no reward: {error.problem}. Ask again."
            raise ApiError(503, problem, UNAVAILABLE) from None
        except RlhfError as error:
            raise _cannot_be_scored(error) from None


def _prompt(messages: Sequence[dict[str, Any]]) -> Prompt:
    """The prompt that the responses answer.

    Raises:
        ApiError: nothing can score answers to it, such as one with pictures.
    """
    try:
        return Prompt.create(read_messages(messages), "test", "")
    except InputError as error:
        raise _cannot_be_scored(error) from None


def _cannot_be_scored(error: RlhfError) -> ApiError:
    return ApiError(400, f"The responses cannot be scored: {error.problem}. {error.remedy}")


def _sum_of(usages: Sequence[Any]) -> dict[str, int]:
    """The tokens of several completions."""
    reported = [usage for usage in usages if isinstance(usage, dict)]
    return {name: sum(int(usage.get(name) or 0) for usage in reported) for name in USAGE}
