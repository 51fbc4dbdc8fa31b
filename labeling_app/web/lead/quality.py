"""`/lead/quality`: how people work and how far they agree; every text is escaped."""

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from labeling_app.annotators.users import User
from labeling_app.db.store import Store
from labeling_app.quality.report import measure_quality
from labeling_app.rankings.agreement import Interval
from labeling_app.web.access.content_policy import html_page
from labeling_app.web.lead.frame import LeadFrame, sender_of

PATH = "/lead/quality"
TEMPLATE = "lead/quality.html"
NOBODY = User(name="", role="lead", disabled=False, epoch=0)


def add_quality_page(app: FastAPI, frame: LeadFrame, store: Store) -> None:
    """Serve the page, also under its old address `/dashboard`."""
    frame.add_to_navigation("Quality", PATH)

    @app.get(PATH)
    def quality(request: Request) -> HTMLResponse:
        return html_page(dashboard_page(store, frame, sender_of(request)))

    @app.get("/dashboard")
    def dashboard() -> RedirectResponse:
        return RedirectResponse(PATH, status_code=303)


def dashboard_page(store: Store, frame: LeadFrame | None = None, sender: User = NOBODY) -> str:
    """The page as of now."""
    frame = frame or LeadFrame()
    frame.templates.filters |= {
        "interval": _interval,
        "coefficient": _coefficient,
        "percent": _percent,
    }
    return frame.render(TEMPLATE, sender, PATH, quality=measure_quality(store))


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
