"""Requests that arrive while others are being answered wait, and are then answered together."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from anyio.to_thread import run_sync

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class RequestBatcher(Generic[Question, Answer]):
    """Turns many callers into few batches; one who comes alone is answered at once.

    Args:
        answer_all: answers a batch, in its order; called in a thread, one batch at a time.
    """

    def __init__(self, answer_all: Callable[[Sequence[Question]], Sequence[Answer]]) -> None:
        self._answer_all = answer_all
        self._turn = asyncio.Lock()
        self._open: tuple[list[Question], asyncio.Task[Sequence[Answer]]] | None = None

    async def answer(self, question: Question) -> Answer:
        """The answer to one question; what its batch raises, everybody in it gets."""
        if self._open is None:
            questions: list[Question] = []
            self._open = questions, asyncio.create_task(self._run(questions))
        questions, batch = self._open
        place = len(questions)
        questions.append(question)
        # Shielded: one caller who goes away must not cancel the work of the others.
        return (await asyncio.shield(batch))[place]

    async def _run(self, questions: list[Question]) -> Sequence[Answer]:
        async with self._turn:
            self._open = None  # whoever comes from now on is in the next batch
            return await run_sync(self._answer_all, questions)
