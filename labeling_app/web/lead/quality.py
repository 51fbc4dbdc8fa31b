"""`/lead/quality`: how people work and how far they agree; every text is escaped."""

from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from labeling_app.db.answers.served import served_alone
from labeling_app.db.store import Store
from labeling_app.quality.report import open_work, state_of_rankings
from labeling_app.web.lead.frame import LeadFrame
from labeling_app.web.lead.measured import FILTERS, Measured, Measurements
from labeling_app.web.lead.served import Compare, compared_policies
from rlhf.errors import InputError

PATH = "/lead/quality"
TEMPLATE = "lead/quality.html"


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

    def values(measured: Measured) -> dict[str, Any]:
        return {
            "measured": measured,
            "is_old": measured.state != state_of_rankings(store),
            "work": open_work(store),
            "served": compared_policies(store, compare),
            "alone": served_alone(store.connections),
        }

    @app.get(PATH)
    async def quality(request: Request) -> HTMLResponse:
        try:
            measured = await measurements.soon()
        except InputError as error:  # nothing else can be served from this database either
            return frame.broken_page(request, "Quality", error, status_code=503)
        return frame.page(request, TEMPLATE, **await to_thread.run_sync(values, measured))

    @app.get("/dashboard")
    def dashboard() -> RedirectResponse:
        return RedirectResponse(PATH, status_code=303)
