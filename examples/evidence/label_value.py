"""What the next label is worth: a forecast from few labels, and what more of them really gave.

`rlhf train-reward --learning-curve` sees the first labels only and forecasts the accuracy with
twice and four times as many. Reward models of as many labels are then trained and measured on the
same held-out pairs. The labels are those of `people.py`, of both splits A and B, in one order.
"""

from pathlib import Path

import numpy as np
from experiment import Config, Table, flags, interval, run, stage, write_dataset
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from people import as_records, draw_test, is_bare, read_pairs

from reward.report.health_page import draw_learning_curve
from reward.report.learning_curve import forecasts_of


def measure(config: Config, out: Path) -> Config:
    """The learning curve of the first labels, then the accuracy at every number it forecasts."""
    pairs = read_pairs(config["data"])
    pool = [pair for pair in (*pairs["A"], *pairs["B"]) if not is_bare(pair)]
    test = draw_test(config, pairs["heldout"], pool)
    order = np.random.default_rng(config["seed"]).permutation(len(pool))

    def train(labels: int, *how: str) -> Config:
        chosen = [pool[place] for place in order[:labels]]
        train = as_records(config, chosen, "train")
        data = write_dataset(out / f"labels-{labels}", [*train, *test])
        base = ["--rankings", data, "--model", config["model"], "--seed", config["seed"]]
        return stage(
            out / f"reward-{labels}", "train-reward", *base, *flags(config["reward"]), *how
        )

    curve = train(config["labels"], "--learning-curve")["learning_curve"]
    measured = [
        {"labels": one["labels"], **train(one["labels"])["accuracy"]} for one in forecasts_of(curve)
    ]
    return {"curve": curve, "measured": measured}


def tabulate(result: Config) -> Table:
    """One row for each training: those that the forecast has seen, then those that check it."""
    rows = [["labels", "seen by the forecast", "forecast (95 %)", "measured (95 %)", "held"]]
    rows += [
        [f"{one['labels']:,}", "yes", "", interval(one), ""] for one in result["curve"]["points"]
    ]
    for forecast, one in zip(forecasts_of(result["curve"]), result["measured"], strict=True):
        held = "yes" if forecast["low"] <= one["value"] <= forecast["high"] else "no"
        rows.append([f"{one['labels']:,}", "no", interval(forecast), interval(one), held])
    return rows


def plot(result: Config) -> Figure:
    """The report's picture of the forecast, with what was measured afterwards."""
    figure = draw_learning_curve(result["curve"])
    FigureCanvasAgg(figure)
    figure.set_size_inches(8, 5)
    [axes] = figure.axes
    later = result["measured"]
    found = [one["labels"] for one in later], [one["value"] for one in later]
    axes.plot(*found, "D", color="#b45309", label="measured afterwards")
    axes.set_ylabel("share of held-out judgments ordered as people did")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run("label_value", measure, tabulate, plot)
