"""Measures the latest rankings for the page Quality, in a process of its own.

Measuring takes a second or two of a processor, and making tables of a hundred people 50 ms, in
which nobody else would get an answer. In a thread either would delay the board.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

from anyio import to_process, to_thread
from jinja2 import Environment

from labeling_app.db.people.pseudonyms import pseudonym
from labeling_app.db.store import Store
from labeling_app.quality.report import (
    TOO_FAST_CHARACTERS_PER_SECOND,
    Quality,
    measure_quality,
    state_of_rankings,
)
from labeling_app.rankings.agreement import Interval
from labeling_app.web.lead.templates import load_templates
from rlhf.records.wording import counted

TABLES = "lead/measured.html"
# A page that comes later than this feels broken; one with the numbers before doesn't.
PATIENCE_SECONDS = 0.15
REST = 3.0
TOO_FEW = "too few to say"
# Of the range of a number: the 95 % interval of a share (Wilson, 1927) is wider after one answer.
WIDEST = 0.75


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement.

    Args:
        state: of the rankings, as `state_of_rankings` says it: where it is another one now, some
            rankings are missing.
        quality: the numbers.
        tables: HTML of those that fill tables.
        at: when it began, in seconds since 1970.
        seconds: how long it took.
    """

    state: object
    quality: Quality
    tables: str
    at: float
    seconds: float

    @property
    def age(self) -> str:
        """How long ago it began, in words: "12 seconds"."""
        seconds = max(0, round(time.time() - self.at))
        for length, noun in ((3600, "hour"), (60, "minute")):
            if seconds >= 2 * length:
                return counted(seconds // length, noun)
        return counted(seconds, "second")


def measure(path: Path) -> Measured:
    """Measure a database that another process serves."""
    at, began = time.time(), time.perf_counter()
    with Store(path, read_only=True) as store:
        state = state_of_rankings(store)
        quality = measure_quality(store)
        pseudonyms = {
            person.name: pseudonym(store.secret, person.name) for person in quality.people
        }
    tables = (
        _templates()
        .get_template(TABLES)
        .render(
            quality=quality,
            pseudonyms=pseudonyms,
            too_fast=TOO_FAST_CHARACTERS_PER_SECOND,
            is_known=is_known,
        )
    )
    seconds = time.perf_counter() - began
    return Measured(state=state, quality=quality, tables=tables, at=at, seconds=seconds)


class Measurements:
    """Measurements of one database, made again only when there are other rankings.

    Args:
        store: the database.
        rest: how long `soon` waits before it measures again, in lengths of a measurement: the board
            needs the processors, too.
    """

    def __init__(self, store: Store, rest: float = REST) -> None:
        self._store = store
        self._rest = rest
        self._turn = asyncio.Lock()  # several leads wait for one measurement
        self._last: Measured | None = None
        self._measuring: asyncio.Task[Measured] | None = None
        self._rests_until = 0.0

    async def newest(self) -> Measured:
        """As of now.

        Raises:
            InputError: its file cannot be measured.
            sqlite3.DatabaseError: the database cannot be read.
        """
        async with self._turn:
            if self._last is None or await self._is_old(self._last):
                try:
                    self._last = await to_process.run_sync(measure, self._store.connections.path)
                finally:  # a file that cannot be measured is not tried at every look either
                    took = self._last.seconds if self._last else 0.0
                    self._rests_until = time.monotonic() + self._rest * took
            return self._last

    async def soon(self, patience_seconds: float = PATIENCE_SECONDS) -> Measured:
        """As of now or, where that takes longer, the measurement before.

        While a hundred people submit there are other rankings at every moment, and whoever waited
        for the newest numbers would always wait.

        Args:
            patience_seconds: how long to wait for the next measurement; where the one before took
                longer, nobody waits.

        Raises:
            InputError: its file could not be measured, perhaps while nobody waited.
            sqlite3.DatabaseError: the database cannot be read.
        """
        before, measuring = self._last, self._measuring
        if measuring is not None and measuring.done():
            self._measuring = None
            measuring.result()  # raises what went wrong while nobody waited
        if before is not None and (
            time.monotonic() < self._rests_until or not await self._is_old(before)
        ):
            return before
        measuring = self._measuring = self._measuring or asyncio.create_task(self.newest())
        if before is None or before.seconds < patience_seconds:
            # Others may wait for it, too: whoever leaves does not end it.
            await asyncio.wait([measuring], timeout=None if before is None else patience_seconds)
        if before is None or measuring.done():
            if self._measuring is measuring:
                self._measuring = None
            return measuring.result()
        return before

    async def _is_old(self, measured: Measured) -> bool:
        return await to_thread.run_sync(state_of_rankings, self._store) != measured.state


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}\u00a0%"


def is_known(value: Interval, scale: float = 1.0) -> TypeGuard[tuple[float, float, float]]:
    """Whether a number says enough to be shown: its interval covers at most `WIDEST` of its scale.

    Args:
        value: the number with its interval, if it has one.
        scale: how far the number's largest value is from its smallest.
    """
    _, low, high = value
    return low is not None and high is not None and high - low <= WIDEST * scale


def _interval(value: Interval | None) -> str:
    if value is None:
        return "–"
    if not is_known(value):
        return TOO_FEW
    mean, low, high = value
    return f"{_percent(mean)} ({100 * low:.0f}–{100 * high:.0f})"


def _coefficient(value: Interval | None) -> str:
    if value is None:
        return "–"
    if not is_known(value, scale=2.0):
        return TOO_FEW
    mean, low, high = value
    return f"{mean:z.2f} ({low:z.2f}\u00a0to\u00a0{high:z.2f})"


FILTERS: dict[str, Callable[..., str]] = {
    "interval": _interval,
    "coefficient": _coefficient,
    "percent": _percent,
}


@cache
def _templates() -> Environment:
    templates = load_templates()
    templates.filters |= FILTERS
    return templates
