"""Pictures: the numbers they print, names drawn as they are, and no global state."""

import base64
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from policies.evaluate import plots

RATES = [
    ("Signal: score", {"value": 0.781, "low": 0.699, "high": 0.852, "n": 64}),
    ("Reward model", {"value": 0.5, "low": None, "high": None, "n": 1}),
]
HOSTILE = "$\\frac{1}$ <b>&\x00\x1b\u202e 中文 " + "w" * 100


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def svg(figure) -> ElementTree.Element:
    uri = plots.to_data_uri(figure)
    return ElementTree.fromstring(base64.b64decode(uri.partition("base64,")[2]))


def test_percent_and_interval_text() -> None:
    assert plots.percent(0.784) == "78\u00a0%"
    assert plots.percent(1.0) == "100\u00a0%"
    assert plots.percent(None) == plots.percent(float("nan")) == "–"
    assert plots.interval_text(RATES[0][1]) == "70–85\u00a0%"
    assert plots.interval_text(RATES[1][1]) == "–"


def test_win_rates_draw_bars_of_the_right_length_and_print_the_numbers() -> None:
    figure = plots.win_rates(RATES)
    bars = sorted((bar.get_y(), bar.get_width()) for bar in figure.axes[0].patches)
    assert [width for _, width in bars] == [0.5, 0.781]  # the first judge stands on top
    assert {"Signal: score", "Reward model", "78\u00a0%", "70–85\u00a0%"} <= set(texts(figure))
    lines = [line.get_xdata() for line in figure.axes[0].lines]
    assert any(np.array_equal(line, [0.699, 0.852]) for line in lines)


def test_groups_are_ordered_by_win_rate_or_as_given() -> None:
    rows = [
        (name, {"value": value, "low": 0.0, "high": 1.0, "n": 4})
        for name, value in (("a", 0.2), ("b", 0.9), ("c", 0.5))
    ]
    figure = plots.win_rate_by_group(rows, sort_by_value=True)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["a", "c", "b"]  # from the bottom up
    kept = plots.win_rate_by_group(rows, sort_by_value=False)
    assert [label.get_text() for label in kept.axes[0].get_yticklabels()] == ["c", "b", "a"]
    assert texts(figure).count("n = 4") == 3


def test_distributions_are_shares_of_each_side_and_name_their_means() -> None:
    figure = plots.score_distributions([("Scores", [1.0, 3.0], [0.0, 0.0, 3.0, 1.0])])
    heights = [patch.get_data().values for patch in figure.axes[0].patches[::2]]
    assert [values.sum() for values in heights] == pytest.approx([1.0, 1.0])
    assert {"new +2.00", "original +1.00", "Scores"} <= set(texts(figure))


@pytest.mark.parametrize(
    ("policy", "reference"),
    [([0.0], [0.0]), ([1.0, float("nan")], [None, 1.0]), ([], [0.5]), ([], []), ([2.0], [-2.0])],
)
def test_distributions_of_degenerate_scores_draw(policy, reference) -> None:
    svg(plots.score_distributions([("Scores", policy, reference)]))


def test_curves_leave_a_gap_where_a_value_is_missing_and_label_the_last_one() -> None:
    figure = plots.training_curves(
        {"Reward": [(1, 0.5), (2, None), (3, 1.25)], "KL": [(1, 0.0)], "Empty": [(1, None)]}
    )
    drawn = figure.axes[0].lines[0].get_ydata()
    assert drawn[0] == 0.5
    assert np.isnan(drawn[1])
    assert {"1.25", "0", "Reward", "KL", "Empty"} <= set(texts(figure))
    svg(figure)


@pytest.mark.parametrize("count", range(1, 7))
def test_where_there_is_no_curve_there_is_no_frame(count: int) -> None:
    curves = {f"Curve {n}": [(1, 0.5), (2, 1.0)] for n in range(count)}
    figure = plots.training_curves(curves)
    framed = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_lines()[0].get_ydata()[1] for axes in framed] == [1.0] * count


def test_the_new_model_stands_at_its_kl_and_score_beside_best_of_n() -> None:
    panel = plots.KLPanel(
        title="Gold", best_of_n=[(0.0, 0.1, 1), (0.44, 0.6, 2)], original=0.1, new=(2.0, 0.8)
    )
    figure = plots.reward_against_kl([panel])
    curve, _, point = figure.axes[0].lines
    assert np.array_equal(curve.get_xydata(), [[0.0, 0.1], [0.44, 0.6]])
    assert np.array_equal(point.get_xydata(), [[2.0, 0.8]])
    assert {"Gold", "best of 2", "new +0.80"} <= set(texts(figure))
    svg(plots.reward_against_kl([plots.KLPanel(title="", best_of_n=[], original=0, new=(1, None))]))


def test_pictures_name_their_axes() -> None:
    curves = {f"Curve {n}": [(1, 0.5)] for n in range(3)}
    panel = plots.KLPanel(title="", best_of_n=[], original=0.0, new=(1.0, 0.5))
    for figure, *expected in (
        (plots.win_rates(RATES), ("comparisons won; dashed: equal models", "")),
        (
            plots.score_distributions([("a", [1.0], [0.0]), ("b", [1.0], [0.0])]),
            ("", "share of responses"),
            ("score", "share of responses"),
        ),
        (
            plots.reward_against_kl([panel, panel]),
            ("", ""),
            ("√ of the reverse KL in nats per response", ""),
        ),
        # the last curve of each column; titles have the units of the others
        (plots.training_curves(curves), ("", ""), ("step", ""), ("step", ""), ("", "")),
    ):
        found = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
        assert found == expected


def test_hostile_names_are_drawn_as_they_are() -> None:
    rate = RATES[0][1]
    for figure in (
        plots.win_rates([(HOSTILE, rate)]),
        plots.win_rate_by_group([(HOSTILE, rate)], sort_by_value=True),
        plots.score_distributions([(HOSTILE, [1.0], [0.0])]),
        plots.training_curves({HOSTILE: [(1, 1.0)]}),
    ):
        svg(figure)
        assert any(text.startswith("$\\frac{1}$ <b>& 中文 www") for text in texts(figure))


def test_no_pyplot_no_changed_settings_and_the_same_bytes_twice() -> None:
    before = dict(matplotlib.rcParams)
    first = plots.to_data_uri(plots.win_rates(RATES))
    assert plots.to_data_uri(plots.win_rates(RATES)) == first
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or "matplotlib.pyplot" not in vars(plots)
