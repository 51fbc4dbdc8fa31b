"""report.html of `rlhf benchmark`: a picture and a table. It opens offline and runs no script."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from policies.evaluate.plots import to_data_uri
from rlhf.planning.price import cost_in_words
from rlhf.records.jsonl import write_text_atomically

PANEL = (5.2, 3.6)  # inches
SPEEDS = {"tokens_per_second": "tokens per second", "scores_per_second": "scores per second"}
Rows = Sequence[Mapping[str, Any]]


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report, as report.json holds it."""
    page = _template().render(
        report=report,
        cost=cost_in_words(report["cost"]),
        kinds={
            kind: rows
            for kind in ("policy", "reward model")
            if (rows := [row for row in report["rows"] if row["kind"] == kind])
        },
        picture=to_data_uri(draw(report["rows"])),
    )
    write_text_atomically(path, lambda stream: stream.write(page))


@cache
def _template() -> Template:
    """The page's template, compiled once."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("benchmark.html")


def draw(rows: Rows) -> Figure:
    """Speed and median latency against the batch size, a line for each model and length."""
    kinds = [speed for speed in SPEEDS if any(speed in row for row in rows)]
    width, height = PANEL
    figure = Figure((2 * width, height * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(kinds), 2, squeeze=False)
    for speed, (left, right) in zip(kinds, panels, strict=True):
        mine = [row for row in rows if speed in row]
        _lines(left, mine, lambda row, speed=speed: row[speed], SPEEDS[speed])
        _lines(right, mine, lambda row: row["latency"]["p50"], "median seconds of a batch")
        left.legend(fontsize=8, frameon=False)
    return figure


def _lines(axes: Axes, rows: Rows, value: Any, label: str) -> None:
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = f"{row['run']}, {row['prompt_tokens']} + {row['answer_tokens']} tokens"
        lines.setdefault(name.replace("$", r"\$"), []).append(row)
    for name, points in lines.items():
        axes.plot([row["batch_size"] for row in points], list(map(value, points)), "o-", label=name)
    sizes = sorted({row["batch_size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="batch size", ylabel=label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
