"""The pictures of a report, as matplotlib figures that depend on nothing but their arguments.

Figures are made without pyplot, so no window, no state and no display are needed. The accent color
means the new policy, grey means the original model; labels are at the data, not in a legend.
Names that come from outside (sources, judges) are drawn as they are: no mathtext, no markup.
"""

import base64
import math
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal, TypeGuard

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

ACCENT, PALE, GREY = "#2563eb", "#93b4f8", "#94a3b8"
INK, MUTED, GRID = "#0f172a", "#64748b", "#e2e8f0"
MAX_LABEL_CHARACTERS = 40
PANEL_WIDTH = 5.2  # inches; a panel then stands in the report at its own size
MAX_BINS = 24
NO_NUMBER = "–"

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class KLPanel:
    """One judge's view of the new model.

    Args:
        title: whose scores.
        best_of_n: (√KL, mean score, n) of choosing among n answers of the original.
        original: the original's mean score.
        new: √KL and mean score of the new model.
    """

    title: str
    best_of_n: Sequence[tuple[float, float, int]]
    original: float
    new: tuple[float | None, float | None]


def percent(share: float | None) -> str:
    """A share as whole percent, `78 %`; a dash where there is no number."""
    if share is None or not math.isfinite(share):
        return NO_NUMBER
    return f"{100 * share:.0f}\u00a0%"


def interval_text(rate: Mapping[str, Any]) -> str:
    """An interval as `70–85 %`; a dash where there is none."""
    low, high = rate["low"], rate["high"]
    if not (_is_number(low) and _is_number(high)):
        return NO_NUMBER
    return f"{100 * low:.0f}–{percent(high)}"


def win_rates(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """Bars of win rates with their intervals, against the line of no difference.

    Args:
        rows: a judge's name and its `value`, `low` and `high`, the judge that matters most first.
    """
    figure = _figure(PANEL_WIDTH, 0.6 + 0.75 * len(rows))
    _draw_win_rates(figure.subplots(), rows)
    return figure


def win_rate_by_group(
    rows: Sequence[tuple[str, Mapping[str, Any]]], *, sort_by_value: bool
) -> Figure:
    """One dot with its interval for every group of prompts, from the top down.

    Args:
        rows: a group's name and its `value`, `low`, `high` and `n`.
        sort_by_value: best first, instead of in the order given.
    """
    figure = _figure(PANEL_WIDTH, 0.6 + 0.27 * len(rows))
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: row[1]["value"]) if sort_by_value else rows[::-1]
    for y, (_, rate) in enumerate(ordered):
        _draw_interval(axes, rate, y, GREY, width=2.5)
        axes.plot([rate["value"]], [y], "o", color=ACCENT, markersize=7, zorder=4, clip_on=False)
        axes.text(1.04, y, percent(rate["value"]), va="center", ha="left", fontsize=9.5, color=INK)
        axes.text(1.19, y, f"n = {rate['n']}", va="center", ha="left", fontsize=8.5, color=MUTED)
    labels = [_literal(name) for name, _ in ordered]
    axes.set_yticks(range(len(ordered)), labels, parse_math=False, fontsize=9.5, color=INK)
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    _as_shares_of_wins(axes)
    return figure


def score_distributions(panels: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> Figure:
    """How often each score occurs among new and original responses, one panel per judge.

    Args:
        panels: the judge's name, the scores of the new policy, the scores of the original model.
    """
    figure = _figure(PANEL_WIDTH, 2.4 * len(panels))
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (name, policy, reference) in zip(rows, panels, strict=True):
        _draw_distribution(axes, policy, reference)
        _title(axes, name)
        _name_axes(axes, y="share of responses")
    _name_axes(rows[-1], x="score")
    return figure


def reward_against_kl(panels: Sequence[KLPanel]) -> Figure:
    """Mean score against √KL of the new model, with the best-of-n curve of the original."""
    figure = _figure(PANEL_WIDTH, 2.4 * len(panels))
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_kl_panel(axes, panel)
        _title(axes, panel.title)
    _name_axes(rows[-1], x="√ of the reverse KL in nats per response")
    return figure


def training_curves(curves: Mapping[str, Curve]) -> Figure:
    """Small multiples of what training measured at each step, two in a row.

    Args:
        curves: a title and its (step, value) points; values that are not finite leave a gap.
    """
    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = _figure(PANEL_WIDTH, 1.9 * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (title, points) in zip(grid, curves.items(), strict=False):
        _draw_curve(axes, points)
        _title(axes, title)
    for axes in grid[len(curves) :]:
        axes.set_axis_off()
    for axes in grid[max(0, len(curves) - columns) : len(curves)]:  # nothing stands below
        _name_axes(axes, x="step")
    return figure


def to_data_uri(figure: Figure) -> str:
    """The figure as an SVG inside a `data:` URI; the same figure gives the same text."""
    buffer = BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "rlhf"}):
        # A name in a script that the font lacks is drawn as boxes; the tables spell it out.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", dpi=72, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(h_pad=0.08, hspace=0.06)
    return figure


def _draw_win_rates(axes: Axes, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    for y, (name, rate) in enumerate(reversed(rows)):
        color = ACCENT if y == len(rows) - 1 else PALE
        axes.barh(y, rate["value"], height=0.4, color=color, zorder=2)
        _draw_interval(axes, rate, y, "white", width=4, cap=0.09)
        _draw_interval(axes, rate, y, INK, width=1.4, cap=0.08)
        axes.text(
            0, y + 0.26, _literal(name), fontsize=10, color=INK, va="bottom", parse_math=False
        )
        for text, size, color, lift in (
            (percent(rate["value"]), 15, INK, 4),
            (interval_text(rate), 9, MUTED, -11),
        ):
            axes.annotate(
                text,
                (1.04, y),
                xytext=(0, lift),
                textcoords="offset points",
                fontsize=size,
                color=color,
                va="center",
                annotation_clip=False,
            )
    axes.set_ylim(-0.45, len(rows) - 0.4)
    axes.set_yticks([])
    _as_shares_of_wins(axes)


def _draw_interval(
    axes: Axes, rate: Mapping[str, Any], y: int, color: str, width: float, cap: float = 0.0
) -> None:
    low, high = rate["low"], rate["high"]
    if not (_is_number(low) and _is_number(high)):
        return
    axes.plot([low, high], [y, y], color=color, linewidth=width, zorder=3)
    if cap:
        axes.vlines([low, high], y - cap, y + cap, color=color, linewidth=width, zorder=3)


def _as_shares_of_wins(axes: Axes) -> None:
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: percent(share)))
    _name_axes(axes, x="comparisons won; dashed: equal models")
    _quiet(axes, grid="x")
    axes.axvline(0.5, color=INK, linewidth=1, linestyle=(0, (3, 3)), zorder=2.5)


def _draw_distribution(axes: Axes, policy: Sequence[float], reference: Sequence[float]) -> None:
    """Step histograms over common bins, each with its name at its mean."""
    sets = [np.array([v for v in scores if _is_number(v)]) for scores in (reference, policy)]
    together = np.concatenate(sets)
    if together.size == 0:
        axes.set_axis_off()
        return
    low, high = float(together.min()), float(together.max())
    margin = 0.5 if low == high else 0.0
    edges = np.linspace(low - margin, high + margin, _num_bins(together.size) + 1)
    means = [float(scores.mean()) if scores.size else math.nan for scores in sets]
    for index, (color, name) in enumerate(((GREY, "original"), (ACCENT, "new"))):
        if sets[index].size == 0:
            continue
        share = np.histogram(sets[index], edges)[0] / sets[index].size
        axes.stairs(share, edges, fill=True, color=color, alpha=0.22, zorder=2)
        axes.stairs(share, edges, color=color, linewidth=1.8, zorder=3)
        to_the_right = means[index] > means[1 - index] or (index == 1 and means[0] == means[1])
        _mark_mean(axes, means[index], color, name, to_the_right=to_the_right)
    axes.set_ylim(0, 1.18 * axes.get_ylim()[1])  # room for the two names above the bars
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda share, _: percent(share) if share <= 1 else "")
    )
    _quiet(axes, grid="y")


def _mark_mean(axes: Axes, mean: float, color: str, name: str, *, to_the_right: bool) -> None:
    """A line at the mean with the name on top, on the side away from the other mean."""
    axes.axvline(mean, color=color, linewidth=1.2, linestyle=(0, (3, 3)), zorder=2.5)
    axes.annotate(
        f"{name} {mean:+z.2f}",
        (mean, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3 if to_the_right else -3, -3),
        textcoords="offset points",
        ha="left" if to_the_right else "right",
        va="top",
        fontsize=9.5,
        color=MUTED if color == GREY else color,
    )


def _draw_kl_panel(axes: Axes, panel: KLPanel) -> None:
    if panel.best_of_n:
        distances, scores, numbers = zip(*panel.best_of_n, strict=True)
        axes.plot(distances, scores, "o-", color=GREY, linewidth=1.6, markersize=4, zorder=2)
        axes.annotate(
            f"best of {numbers[-1]}" if numbers[-1] > 1 else "original",
            (distances[-1], scores[-1]),
            xytext=(6, -4),
            textcoords="offset points",
            fontsize=9.5,
            color=MUTED,
            va="top",
        )
    axes.axhline(panel.original, color=GREY, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    distance, score = panel.new
    if _is_number(distance) and _is_number(score):
        axes.plot([distance], [score], "o", color=ACCENT, markersize=8, zorder=4)
        axes.annotate(
            f"new {score:+z.2f}",
            (distance, score),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=ACCENT,
        )
    axes.margins(x=0.12, y=0.25)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    _quiet(axes, grid="y")


def _draw_curve(axes: Axes, points: Curve) -> None:
    steps = [step for step, _ in points]
    values = [value if _is_number(value) else math.nan for _, value in points]
    axes.plot(steps, values, color=ACCENT, linewidth=1.6, zorder=3)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if _is_number(value)]
    if finite:
        axes.plot(*finite[-1], "o", color=ACCENT, markersize=5, zorder=4)
        axes.annotate(
            f"{finite[-1][1]:.3g}",
            finite[-1],
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=ACCENT,
            annotation_clip=False,
        )
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _quiet(axes, grid="y")


def _quiet(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Hide the frame and draw light grid lines."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    if grid == "x":
        axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    axes.grid(axis=grid, color=GRID, linewidth=0.9, zorder=0)
    axes.set_axisbelow(True)


def _name_axes(axes: Axes, x: str = "", y: str = "") -> None:
    """Name one axis or both, the names beside the numbers."""
    for name, to_label in ((x, axes.set_xlabel), (y, axes.set_ylabel)):
        if name:
            to_label(name, fontsize=9, color=MUTED)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(
        _literal(text, 64), loc="left", fontsize=10.5, color=INK, pad=10, parse_math=False
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _num_bins(count: int) -> int:
    return max(4, min(MAX_BINS, math.isqrt(2 * count)))


def _literal(text: str, limit: int = MAX_LABEL_CHARACTERS) -> str:
    """The text without control characters, which an SVG may not hold, cut to a label's length."""
    printable = "".join(c for c in text if unicodedata.category(c)[0] != "C" or c == " ")
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"
