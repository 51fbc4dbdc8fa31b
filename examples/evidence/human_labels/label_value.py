"""What the next label is worth: a forecast from few labels, and what more of them really gave.

`rlhf train-reward --learning-curve` sees the first labels only and forecasts the accuracy with
twice and four times as many. Reward models of as many labels are then trained and measured on the
same held-out pairs. The labels are those of `people.py`, of both splits A and B, in one order. A
head on the frozen model costs little, so that its forecasts are checked for many orders of labels.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.commands import Config, flags, stage
from examples.evidence.experiment import Table, interval, run, write_dataset
from examples.evidence.human_labels.ethics import as_records, draw_test, is_bare, read_pairs
from examples.evidence.human_labels.heads import (
    Features,
    fit_head,
    one_a_prefix,
    read_features,
    share_right,
)
from reward.report.health_page import draw_learning_curve
from reward.report.learning_curve import Point, forecasts_of, measure_curve
from reward.training.train import PARTS
from rlhf.records.schema import RankedPrompt

HEAD, ALL = "the head", "all weights"


def measure(config: Config, out: Path) -> Config:
    """Forecasts and what was measured afterwards, by what is trained; a run for each order."""
    pairs = read_pairs(config["data"])
    splits = (pairs["A"], pairs["B"])
    checks = {}
    if HEAD in config["trained"]:
        known = {pair["prefix"] for pair in pairs["A"]}
        others = [pair for pair in pairs["B"] if pair["prefix"] not in known]
        pools = [as_records(config, one_a_prefix(split), "train") for split in (pairs["A"], others)]
        both = [pair for split in splits for pair in split if not is_bare(pair)]
        test = draw_test(config | config["heads"], pairs["heldout"], both)
        # split A as other experiments read it, so that they share its features
        features = read_features(config, [*pools[0], *test]) | read_features(config, pools[1])
        pool = [record for records in pools for record in records]
        checks[HEAD] = [
            check_heads(config, pool, test, features, seed)
            for seed in range(config["heads"]["seeds"])
        ]
    if ALL in config["trained"]:
        checks[ALL] = [check_trained(config, splits, pairs["heldout"], out)]
    return {"checks": checks}


def check_trained(
    config: Config, splits: Sequence[Sequence[Config]], held_out: Sequence[Config], out: Path
) -> Config:
    """The learning curve of the first labels, then the accuracy at every number it forecasts."""
    pool = [pair for split in splits for pair in split if not is_bare(pair)]
    test = draw_test(config, held_out, pool)
    order = np.random.default_rng(config["seed"]).permutation(len(pool))

    def train(labels: int, *options: str) -> Config:
        chosen = [pool[index] for index in order[:labels]]
        records = [*as_records(config, chosen, "train"), *test]
        data = write_dataset(out / f"labels-{labels}", records)
        base = ["--rankings", data, "--model", config["model"], "--seed", config["seed"]]
        return stage(
            out / f"reward-{labels}", "train-reward", *base, *flags(config["reward"]), *options
        )

    curve = train(config["labels"], "--learning-curve")["learning_curve"]
    measured = [
        {"labels": forecast["labels"], **train(forecast["labels"])["accuracy"]}
        for forecast in forecasts_of(curve)
    ]
    return {"curve": curve, "measured": measured}


def check_heads(
    config: Config,
    pool: Sequence[RankedPrompt],
    test: Sequence[RankedPrompt],
    features: Features,
    seed: int,
) -> Config:
    """The same of heads on frozen features, for one order of labels."""
    order = np.random.default_rng(seed).permutation(len(pool))

    def fit(labels: int) -> Point:
        head = fit_head([pool[index] for index in order[:labels]], features)
        right = {record.prompt.id: share_right(record, features, head) for record in test}
        counts = {record.prompt.id: len(record.rankings) for record in test}
        pairs = {name: (share * counts[name], counts[name]) for name, share in right.items()}
        value = sum(agreed for agreed, _ in pairs.values()) / sum(counts.values())
        return Point(labels, labels, {"value": value, "low": None, "high": None}, pairs)

    curve = measure_curve([fit(-(-config["labels"] // part)) for part in (*PARTS, 1)])
    measured = [
        {"labels": forecast["labels"], **fit(forecast["labels"]).accuracy}
        for forecast in forecasts_of(curve)
    ]
    return {"curve": curve, "measured": measured}


def tabulate(result: Config) -> Table:
    """One row for each number of labels: those the forecast has seen, then those that check it."""
    header = ["trained", "labels", "orders", "seen by the forecast", "forecast (95 %)", "measured"]
    rows = [[*header, "within the forecast's interval"]]
    for trained, checks in result["checks"].items():
        number = str(len(checks))
        for points in zip(*(check["curve"]["points"] for check in checks), strict=True):
            labels = f"{points[0]['labels']:,}"
            rows.append([trained, labels, number, "yes", "", interval(mean(points)), ""])
        for index, forecasts in enumerate(
            zip(*(forecasts_of(check["curve"]) for check in checks), strict=True)
        ):
            later = [check["measured"][index] for check in checks]
            held = sum(
                forecast["low"] <= accuracy["value"] <= forecast["high"]
                for forecast, accuracy in zip(forecasts, later, strict=True)
            )
            cells = [interval(mean(forecasts)), interval(mean(later)), f"{held} of {number}"]
            rows.append([trained, f"{later[0]['labels']:,}", number, "no", *cells])
    return rows


def mean(rates: Sequence[Config]) -> Config:
    """The mean of several rates and of their ends."""
    return {
        name: None if rates[0][name] is None else float(np.mean([rate[name] for rate in rates]))
        for name in ("value", "low", "high")
    }


def plot(result: Config) -> Figure:
    """The report's picture of the forecast, with what was measured afterwards."""
    [check, *_] = list(result["checks"].values())[-1]
    figure = draw_learning_curve(check["curve"])
    FigureCanvasAgg(figure)
    figure.set_size_inches(8, 5)
    [axes] = figure.axes
    later = check["measured"]
    points = [accuracy["labels"] for accuracy in later], [accuracy["value"] for accuracy in later]
    axes.plot(*points, "D", color="#b45309", markersize=5, label="measured afterwards")
    axes.set_ylabel("held-out judgments ordered as people did")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.legend(frameon=False, loc="upper left")
    return figure


if __name__ == "__main__":
    run("label_value", measure, tabulate, plot)
