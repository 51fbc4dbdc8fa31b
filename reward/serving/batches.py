"""Requests that wait at the same time are scored together, in one thread."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

from reward.scoring.texts import PromptResponses
from rlhf.errors import InputError

Score = Callable[[Sequence[PromptResponses]], list[float]]
Outcome = list[float] | InputError


class QueueFullError(Exception):
    """So many responses wait that a request is not accepted now."""


@dataclass
class RequestCounts:
    """Counts of a server since it started."""

    requests: int = 0
    items: int = 0
    """Responses that were scored; `tokens` are theirs, prompts included."""
    tokens: int = 0
    batches: int = 0
    scoring_seconds: float = 0.0
    waiting_items: int = 0
    """Responses that were accepted and not answered yet."""


@final
class SharedBatches:
    """Scores concurrent requests in shared batches; a single request is scored at once.

    Args:
        score: the rewards of several responses, in their order; called in one thread.
        counts: what is counted; `score` adds the tokens, the routes add requests and items.
        max_waiting: responses that may wait at the same time.
    """

    def __init__(self, score: Score, counts: RequestCounts, max_waiting: int) -> None:
        self.counts = counts
        self.max_waiting = max_waiting
        self._score = score
        self._waiting: list[tuple[Sequence[PromptResponses], asyncio.Future[Outcome]]] = []
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    async def rewards(self, answers: Sequence[PromptResponses]) -> list[float]:
        """The rewards of one request.

        Raises:
            QueueFullError: too many responses wait.
            InputError: a response of this request cannot be scored, or it has too many.
        """
        if len(answers) > self.max_waiting:
            raise InputError(
                f"The request has {len(answers)} items, and at most {self.max_waiting} may wait",
                "Send fewer items in one request, or start the server with a larger --max-queue.",
            )
        if self.counts.waiting_items + len(answers) > self.max_waiting:
            raise QueueFullError
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((answers, future))
        self.counts.waiting_items += len(answers)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        outcome = await future
        if isinstance(outcome, InputError):
            raise outcome
        return outcome

    async def _work(self) -> None:
        """Score all that waits, again and again, until nothing does."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken, self._waiting = self._waiting, []
            requests = [answers for answers, _ in taken]
            began = time.monotonic()
            try:
                outcomes = await loop.run_in_executor(self._thread, self._score_all, requests)
            except Exception as error:  # of any kind: these callers get it, later ones are served
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), outcome in zip(taken, outcomes, strict=True):
                    if not future.done():  # its caller may have left
                        future.set_result(outcome)
            self.counts.batches += 1
            self.counts.scoring_seconds += time.monotonic() - began
            self.counts.waiting_items -= sum(map(len, requests))
        self._working = None

    def _score_all(self, requests: Sequence[Sequence[PromptResponses]]) -> list[Outcome]:
        """Score several requests at once; if one cannot be scored, each by itself."""
        try:
            rewards = self._score([answer for answers in requests for answer in answers])
        except InputError as error:
            if len(requests) == 1:
                return [error]
            return [self._score_all([answers])[0] for answers in requests]
        rest = iter(rewards)
        return [[next(rest) for _ in answers] for answers in requests]
