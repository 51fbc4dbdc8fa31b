"""Requests that arrive while others are being answered wait and form the next batch."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from anyio.to_thread import run_sync

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class RequestBatcher(Generic[Question, Answer]):
    """Answers concurrent requests in batches; a single request is answered at once.

    Args:
        answer_all: answers a batch, in its order; called in a thread, one batch at a time.
    """

    def __init__(self, answer_all: Callable[[Sequence[Question]], Sequence[Answer]]) -> None:
        self._answer_all = answer_all
        self._turn = asyncio.Lock()
        self._open: tuple[list[Question], asyncio.Task[Sequence[Answer]]] | None = None

    async def answer(self, question: Question) -> Answer:
        """The answer to one question; an exception reaches everybody in its batch."""
        if self._open is None:
            questions: list[Question] = []
            self._open = questions, asyncio.create_task(self._run(questions))
        questions, batch = self._open
        index = len(questions)
        questions.append(question)
        # Shielded: a caller who disconnects must not cancel the others' work.
        return (await asyncio.shield(batch))[index]

    async def _run(self, questions: list[Question]) -> Sequence[Answer]:
        async with self._turn:
            self._open = None  # later requests go into the next batch
            return await run_sync(self._answer_all, questions)
