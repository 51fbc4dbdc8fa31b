"""`/lead/quality`: how people work and how far they agree; every text is escaped."""

import asyncio

from anyio import to_process, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from labeling_app.db.store import Store
from labeling_app.quality.report import Quality, measure_file, open_work, state_of_rankings
from labeling_app.rankings.agreement import Interval
from labeling_app.web.lead.frame import LeadFrame

PATH = "/lead/quality"
TEMPLATE = "lead/quality.html"


class Measurements:
    """What the rankings of a database say, measured again only when there are others.

    Measuring takes a second or two of a processor. In a thread it would delay the board, so it has
    a process, which stays for the next time.

    Args:
        store: the database.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()  # several leads wait for one measurement
        self._measured: tuple[object, Quality] | None = None

    async def newest(self) -> Quality:
        """As of now.

        Raises:
            sqlite3.DatabaseError: the database cannot be read.
        """
        async with self._turn:
            state = await to_thread.run_sync(state_of_rankings, self._store)
            if self._measured is None or self._measured[0] != state:
                path = self._store.connections.path
                self._measured = state, await to_process.run_sync(measure_file, path)
            return self._measured[1]


def add_quality_page(app: FastAPI, frame: LeadFrame, store: Store) -> None:
    """Serve the page, also under its old address `/dashboard`."""
    frame.add_to_navigation("Quality", PATH)
    frame.templates.filters |= FILTERS
    measurements = Measurements(store)

    @app.get(PATH)
    async def quality(request: Request) -> HTMLResponse:
        measured = await measurements.newest()
        work = await to_thread.run_sync(open_work, store)
        return frame.page(request, TEMPLATE, quality=measured, work=work)

    @app.get("/dashboard")
    def dashboard() -> RedirectResponse:
        return RedirectResponse(PATH, status_code=303)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\u00a0%"


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


FILTERS = {"interval": _interval, "coefficient": _coefficient, "percent": _percent}
