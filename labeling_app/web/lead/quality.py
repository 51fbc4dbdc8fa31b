"""`/lead/quality`: how people work and how far they agree; every text is escaped."""

import asyncio
import time

from anyio import to_process, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from labeling_app.db.store import Store
from labeling_app.quality.report import Quality, measure_file, open_work, state_of_rankings
from labeling_app.rankings.agreement import Interval
from labeling_app.web.lead.frame import Filter, LeadFrame
from labeling_app.web.lead.served import Compare, compared_policies
from rlhf.records.wording import counted

PATH = "/lead/quality"
# A page that comes later than this feels broken; one with the numbers before doesn't.
PATIENCE_SECONDS = 0.15
REST = 3.0
TEMPLATE = "lead/quality.html"


class Measurements:
    """What the rankings of a database say, measured again only when there are others.

    Measuring takes a second or two of a processor. In a thread it would delay the board, so it has
    a process, which stays for the next time.

    Args:
        store: the database.
        rest: how long `soon` waits before it measures again, in lengths of a measurement: the board
            needs the processors, too.
    """

    def __init__(self, store: Store, rest: float = REST) -> None:
        self._store = store
        self._rest = rest
        self._turn = asyncio.Lock()  # several leads wait for one measurement
        self._measured: tuple[object, Quality] | None = None
        self._measuring: asyncio.Task[Quality] | None = None
        self._rests_until = 0.0

    async def newest(self) -> Quality:
        """As of now.

        Raises:
            sqlite3.DatabaseError: the database cannot be read.
        """
        async with self._turn:
            state = await to_thread.run_sync(state_of_rankings, self._store)
            if self._measured is None or self._measured[0] != state:
                path = self._store.connections.path
                began = time.monotonic()
                self._measured = state, await to_process.run_sync(measure_file, path)
                now = time.monotonic()
                self._rests_until = now + self._rest * (now - began)
            return self._measured[1]

    async def soon(self, patience_seconds: float = PATIENCE_SECONDS) -> tuple[Quality, bool]:
        """As of now or, where that takes longer, as of the measurement before.

        While a hundred people submit there are other rankings at every moment, and whoever waited
        for the newest numbers would always wait.

        Args:
            patience_seconds: how long to wait where something was measured before.

        Returns:
            The numbers, and whether they are those of before.

        Raises:
            sqlite3.DatabaseError: the database cannot be read.
        """
        before = self._measured
        if before is not None and time.monotonic() < self._rests_until:
            state = await to_thread.run_sync(state_of_rankings, self._store)
            return before[1], before[0] != state
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self.newest())
        if before is not None:
            await asyncio.wait([self._measuring], timeout=patience_seconds)
            if not self._measuring.done():
                return before[1], True
        return await asyncio.shield(self._measuring), False  # others may wait for it, too


def add_quality_page(
    app: FastAPI, frame: LeadFrame, store: Store, compare: Compare | None = None
) -> None:
    """Serve the page, also under its old address `/dashboard`.

    Args:
        app: gets the routes.
        frame: of the page.
        store: the database.
        compare: compares the thumbs of two served policies.
    """
    frame.add_to_navigation("Quality", PATH)
    frame.add_filters(**FILTERS)
    measurements = Measurements(store)

    @app.get(PATH)
    async def quality(request: Request) -> HTMLResponse:
        measured, is_old = await measurements.soon()
        work = await to_thread.run_sync(open_work, store)
        served = await to_thread.run_sync(compared_policies, store, compare)
        values = {"quality": measured, "is_old": is_old, "work": work, "served": served}
        return frame.page(request, TEMPLATE, **values)

    @app.get("/dashboard")
    def dashboard() -> RedirectResponse:
        return RedirectResponse(PATH, status_code=303)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}\u00a0%"


def _interval(value: Interval | None) -> str:
    if value is None:
        return "–"
    mean, low, high = value
    if low is None or high is None:
        return _percent(mean)
    return f"{_percent(mean)} ({100 * low:.0f}–{100 * high:.0f})"


def _coefficient(value: Interval | None) -> str:
    if value is None:
        return "–"
    mean, low, high = value
    return (
        f"{mean:z.2f}" if low is None or high is None else f"{mean:z.2f} ({low:z.2f}–{high:z.2f})"
    )


FILTERS: dict[str, Filter] = {
    "interval": _interval,
    "coefficient": _coefficient,
    "percent": _percent,
    "counted": counted,
}
