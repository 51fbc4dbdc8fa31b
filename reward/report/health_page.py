"""The health report as one page that opens offline: tables, pictures, the worst disagreements.

Texts come from models and people: they are escaped, and the page allows no script.
"""

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reward.report.annotators import describe_annotators
from reward.report.learning_curve import describe_curve, forecasts_of
from rlhf.planning.price import cost_in_words
from rlhf.records.jsonl import write_text_atomically
from rlhf.run.intervals import FEW_PROMPTS, MIN_PROMPTS

ACCENT, GREY = "#2563eb", "#94a3b8"
SIZE = (4.8, 3.4)  # inches


def write_page(path: Path, report: Mapping[str, Any], rewards: Sequence[float]) -> None:
    """Write report.html, of a training or of `rlhf score --rankings`.

    Args:
        path: where to.
        report: what report.json holds.
        rewards: normalized rewards of the responses that fixed the scale; without a training, of
            all responses.
    """
    curve = report.get("learning_curve")
    page = _template().render(
        report=report,
        health=report["health"],
        min_prompts=MIN_PROMPTS,
        few_prompts=FEW_PROMPTS,
        worst=report["worst"],
        annotators=list(describe_annotators(report.get("annotators", {}))),
        cost=cost_in_words(report["cost"]) if "cost" in report else "",
        forecast=describe_curve(curve) if curve else "",
        learning_curve=_data_uri(draw_learning_curve(curve)) if curve else "",
        reliability=_data_uri(draw_reliability(report["health"]["calibration"]["bins"])),
        histogram=_data_uri(draw_histogram(rewards)),
    )
    write_text_atomically(path, lambda stream: stream.write(page))


@cache
def _template() -> Template:
    """The page's template, compiled once."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html")


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
    axes.set(xlim=(0.48, 1.02), ylim=(-0.04, 1.04), xlabel="confidence in the order of a pair")
    axes.set_ylabel("share of pairs ordered right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_learning_curve(curve: Mapping[str, Any]) -> Figure:
    """Accuracy against labels with 95 % intervals; the fitted curve, and forecasts as rings."""
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    points, forecasts, fit = curve["points"], forecasts_of(curve), curve["fit"]
    labels = np.geomspace(points[0]["labels"], forecasts[-1]["labels"], 100)
    axes.plot(labels, fit["a"] - fit["b"] * labels ** -fit["c"], color=GREY, linestyle="--")
    for row in (*points, *forecasts):
        if row["low"] is not None:
            axes.plot([row["labels"]] * 2, [row["low"], row["high"]], color=GREY)
    for rows, fill, label in ((points, ACCENT, "measured"), (forecasts, "white", "forecast")):
        coordinates = [row["labels"] for row in rows], [row["value"] for row in rows]
        axes.plot(*coordinates, "o", color=ACCENT, markerfacecolor=fill, label=label)
    axes.set(xscale="log", xlabel="labels (log scale)", ylabel="share of pairs ordered right")
    axes.set_xticks([row["labels"] for row in (*points, *forecasts)], minor=False)
    axes.set_xticklabels([f"{row['labels']:,}" for row in (*points, *forecasts)])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_histogram(rewards: Sequence[float]) -> Figure:
    """The distribution of rewards."""
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    axes.hist(rewards, bins=24, color=ACCENT)
    axes.set(xlabel="reward", ylabel="number of responses")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _data_uri(figure: Figure) -> str:
    FigureCanvasAgg(figure)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
