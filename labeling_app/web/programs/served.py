"""The label database as `rlhf serve` uses it.

Answers and feedback that arrive together share a transaction, which waits for the disk once.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyio.to_thread import run_sync

from labeling_app.data_io.served import store_served_feedback
from labeling_app.data_io.tokens import owner
from labeling_app.db.answers.served import (
    ThumbCounts,
    count_thumbs,
    forget_served,
    insert_served,
    start_comparison,
)
from labeling_app.db.store import Store
from labeling_app.web.batching import RequestBatcher
from rlhf.errors import InputError
from rlhf.records.served import ServedResponse, Variant


@dataclass(frozen=True)
class _Feedback:
    program: str
    payload: dict[str, Any]


Outcome = bool | InputError | sqlite3.Error


class ServedRecords:
    """Keeps answers, takes feedback and counts thumbs.

    Args:
        store: the database.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batcher = RequestBatcher(self._store_all)

    async def keep(self, served: ServedResponse) -> None:
        """Keep an answer; it is on the disk when this returns.

        Raises:
            sqlite3.Error: it cannot be written.
        """
        await self._answer(served)

    async def add_feedback(self, program: str, payload: dict[str, Any]) -> bool:
        """Store feedback; False if the program said the same before.

        Raises:
            InputError: the feedback is wrong, or its answer is not kept.
            sqlite3.Error: it cannot be written.
        """
        return await self._answer(_Feedback(program, payload))

    async def owner(self, token: str) -> str | None:
        """The program that a token belongs to."""
        return await run_sync(owner, self._store, token)

    async def count_thumbs(self, comparison: int) -> ThumbCounts:
        """Thumbs up and down of both policies."""
        return await run_sync(count_thumbs, self._store.connections, comparison)

    async def forget(self, before: float) -> int:
        """Delete what was kept before a time; returns how many answers."""
        return await run_sync(forget_served, self._store.connections, before)

    def start_comparison(self, sides: Mapping[Variant, str], share: float) -> int:
        """The number of the comparison of two policies at a split."""
        return start_comparison(self._store.connections, sides, share)

    async def _answer(self, wanted: ServedResponse | _Feedback) -> bool:
        outcome = await self._batcher.answer(wanted)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _store_all(self, wanted: Sequence[ServedResponse | _Feedback]) -> list[Outcome]:
        """Store several in one transaction; if that fails, each in its own."""
        try:
            with self._store.connections.write():
                return [self._store_one(record) for record in wanted]
        except sqlite3.Error as error:
            is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if len(wanted) > 1 and not is_busy:
                return [self._store_all([record])[0] for record in wanted]
            return [error] * len(wanted)

    def _store_one(self, wanted: ServedResponse | _Feedback) -> Outcome:
        """What is refused is rolled back alone."""
        db = self._store.connections.db
        try:
            with db.atomic():
                if isinstance(wanted, _Feedback):
                    return store_served_feedback(self._store, wanted.program, wanted.payload)
                insert_served(db, wanted)
                return True
        except InputError as error:
            return error
