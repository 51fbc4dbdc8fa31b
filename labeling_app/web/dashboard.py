"""The dashboard for leads: plain HTML made on the server, every text escaped."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from labeling_app.db.store import Store
from labeling_app.quality.report import Quality, measure_quality
from labeling_app.rankings.agreement import Interval

FOLDER = Path(__file__).parent / "pages" / "board"


def dashboard_page(store: Store, *, has_runs: bool = False) -> str:
    """The dashboard as of now; `has_runs`: with a link to the Runs page."""
    return render(measure_quality(store), has_runs=has_runs)


def render(quality: Quality, *, has_runs: bool = False) -> str:
    """The dashboard with these measurements."""
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
    environment.filters["interval"] = _interval
    environment.filters["coefficient"] = _coefficient
    environment.filters["percent"] = _percent
    return environment.get_template("dashboard.html").render(quality=quality, has_runs=has_runs)


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
