"""The health report as one page that opens offline: tables, two pictures, the worst disagreements.

Texts come from models and people: they are escaped, and the page allows no script.
"""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reward.report.annotators import describe_annotators
from rlhf.records.jsonl import write_text_atomically

ACCENT, GREY = "#2563eb", "#94a3b8"
SIZE = (4.8, 3.4)  # inches


def write_page(path: Path, report: Mapping[str, Any], rewards: Sequence[float]) -> None:
    """Write report.html.

    Args:
        path: where to.
        report: what report.json holds.
        rewards: normalized rewards of the responses that fixed the scale.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html").render(
        report=report,
        health=report["health"],
        worst=report["worst"],
        annotators=list(describe_annotators(report["annotators"])),
        reliability=_data_uri(draw_reliability(report["health"]["calibration"]["bins"])),
        histogram=_data_uri(draw_histogram(rewards)),
    )
    write_text_atomically(path, lambda stream: stream.write(page))


def draw_reliability(bins: Sequence[Mapping[str, float]]) -> Figure:
    """How often the model is right against how sure it is; the area of a dot is its pairs."""
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    axes.plot([0.5, 1], [0.5, 1], color=GREY, linestyle="--", linewidth=1)
    most = max((row["n"] for row in bins), default=1)
    axes.scatter(
        [row["confidence"] for row in bins],
        [row["right"] for row in bins],
        s=[20 + 180 * row["n"] / most for row in bins],
        color=ACCENT,
    )
    axes.set(xlim=(0.48, 1.02), ylim=(-0.04, 1.04), xlabel="confidence", ylabel="right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_histogram(rewards: Sequence[float]) -> Figure:
    """The distribution of rewards."""
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    axes.hist(rewards, bins=24, color=ACCENT)
    axes.set(xlabel="reward", ylabel="responses")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _data_uri(figure: Figure) -> str:
    FigureCanvasAgg(figure)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
