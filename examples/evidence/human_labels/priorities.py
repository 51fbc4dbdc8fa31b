"""Does `rlhf prioritize` save labels: accuracy against labels, in its order and at random.

The labels are those of `people.py`; the pool has one pair for every prefix of split A. In rounds,
the queue of a label database is put in order by what a reward model knows so far, as `rlhf
prioritize` does, an annotator takes the first tasks and gives the labels of people, and the reward
model is fitted anew. It is a head on the frozen model, so that its features are computed once; its
rewards are scaled as `rlhf train-reward` scales them. The first round is random for everybody, and
a fifth of each later one, the least that `rlhf prioritize` allows.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.commands import Config
from examples.evidence.experiment import Table, run, signed_points
from examples.evidence.human_labels.ethics import as_records, draw_test, read_pairs
from examples.evidence.human_labels.heads import (
    Array,
    Features,
    fit_head,
    one_a_prefix,
    read_features,
    share_right,
)
from labeling_app.annotators.prioritizing import RANDOM, PromptResponses, Reader, prioritize
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from policies.evaluate.measures.statistics import bootstrap_interval
from reward.model.normalize import fit_scale
from rlhf.records.jsonl import write_json
from rlhf.records.schema import RankedPrompt

WHO = "people"
RESAMPLES = 2000
ROUNDING = 1e-9


def measure(config: Config, out: Path) -> Config:
    """The accuracy after every round of every method and seed, and the labels that each needs."""
    pairs = read_pairs(config["data"])
    pool = one_a_prefix(pairs["A"])
    test = draw_test(config, pairs["heldout"], pool)
    records = as_records(config, pool, "train")
    features = read_features(config, [*records, *test])
    right = {}
    for by in config["methods"]:
        runs = [follow(config, records, test, features, by, seed, out) for seed in config["seeds"]]
        right[by] = np.array(runs)
    labels = config["round"] * (1 + np.arange(config["rounds"]))
    return {"labels": labels.tolist(), "pool": len(pool), "methods": compare(labels, right)}


def follow(
    config: Config,
    pool: Sequence[RankedPrompt],
    test: Sequence[RankedPrompt],
    features: Features,
    by: str,
    seed: int,
    out: Path,
) -> list[list[float]]:
    """For every round and held-out prompt the share of its judgments ordered right, once."""
    file = out / f"{by}-{seed}.json"
    if file.exists():
        shares: list[list[float]] = json.loads(file.read_text(encoding="utf-8"))
        return shares
    best = {ranking.tiers[0][0] for record in pool for ranking in record.rankings}
    head = np.zeros(len(next(iter(features.values()))))
    rows = []
    with TemporaryDirectory() as folder, Store(Path(folder) / "labels.db") as store:
        store.add_prompts(record.prompt for record in pool)
        store.add_responses(response for record in pool for response in record.responses)
        queue = TaskQueue(store)
        queue.add_annotator(WHO)
        for number in range(config["rounds"]):
            is_random = not number or by == RANDOM
            prioritize(
                store,
                reader(features, head),
                "entropy" if is_random else by,
                random_share=1.0 if is_random else config["random_share"],
                most=len(pool),
                seed=config["rounds"] * seed + number,
            )
            for _ in range(config["round"]):
                give_label(queue, best)
            head = fit(store, test, features)
            rows.append([share_right(record, features, head) for record in test])
    write_json(file, rows)
    return rows


def reader(features: Features, head: Array) -> Reader:
    """A reader of the features and rewards of responses, by a reward model with this head."""

    def read(answers: Sequence[PromptResponses]) -> list[tuple[Any, Any]]:
        rows = [
            np.array([features[response.id] for response in responses]) for _, responses in answers
        ]
        return [(row, row @ head) for row in rows]

    return read


def give_label(queue: TaskQueue, best: set[str]) -> None:
    """Take the next task and say what people said."""
    task = queue.next_task(WHO)
    if task is None:
        raise SystemExit("The pool has no task left: lower `rounds` or `round`.")
    first = int(task.shown_order[0] not in best)
    ranking = Submission(id=f"r{task.id}", task_id=task.id, tiers=((first,), (1 - first,)))
    queue.submit(WHO, ranking)


def fit(store: Store, test: Sequence[RankedPrompt], features: Features) -> Array:
    """The head that fits all labels best, scaled on held-out texts."""
    head = fit_head([record for record in store.ranked_prompts() if record.rankings], features)
    rewards = [features[response.id] @ head for record in test for response in record.responses]
    return head * fit_scale(rewards, "held-out texts").gain


def compare(labels: Array, right: Mapping[str, Array]) -> list[Config]:
    """Accuracy by method, and the labels needed for what random labels reach in the end.

    Intervals are over held-out prompts, the same for all methods.

    Args:
        labels: after each of R rounds.
        right: for each method (S, R, P), of S seeds, R rounds and P held-out prompts.
    """
    means = {by: values.mean(axis=0) for by, values in right.items()}  # (R, P)
    size = means[RANDOM].shape[1]
    equal = np.full(size, 1 / size)
    drawn = np.random.default_rng(0).multinomial(size, equal, size=RESAMPLES) / size
    goals = drawn @ means[RANDOM][-1]
    rows = []
    for by, values in means.items():
        curve = values.mean(axis=1)
        needed = [
            labels_for(goal, labels, resampled)
            for goal, resampled in zip(goals, drawn @ values.T, strict=True)
        ]
        low, high = np.quantile(needed, (0.025, 0.975), method="nearest")
        value = labels_for(float(means[RANDOM][-1].mean()), labels, curve)
        above = (values - means[RANDOM])[1:].mean(axis=0)
        rows.append(
            {
                "by": by,
                "accuracy": curve.tolist(),
                "of_seeds": right[by].mean(axis=2).tolist(),
                "needed": {"value": as_json(value), "low": as_json(low), "high": as_json(high)},
                "above_random": bootstrap_interval(above, seed=0).to_json(),
            }
        )
    return rows


def labels_for(goal: float, labels: Array, curve: Array) -> float:
    """The labels after which a curve first reaches a goal, between rounds on a straight line."""
    [reached] = np.nonzero(curve > goal - ROUNDING)
    if not len(reached):
        return float("inf")
    index = int(reached[0])
    first = max(0, index - 1)
    return float(np.interp(goal, curve[first : index + 1], labels[first : index + 1]))


def as_json(number: float) -> float | None:
    """A number of labels; None where the goal was not reached."""
    return round(float(number)) if np.isfinite(number) else None


def tabulate(result: Config) -> Table:
    """One row for each method."""
    labels = result["labels"]
    shown = sorted({0, len(labels) // 4, len(labels) // 2, len(labels) - 1})
    header = ["order", *(f"with {labels[index]:,} labels" for index in shown)]
    goal = f"labels needed for what random reaches with {labels[-1]:,} (95 %)"
    rows = [[*header, goal, "above random, mean of all later rounds, points (95 %)"]]
    for method in result["methods"]:
        cells = [f"{100 * method['accuracy'][index]:.1f} %" for index in shown]
        value, low, high = (
            f"{number:,}" if number is not None else f"over {labels[-1]:,}"
            for number in (method["needed"][name] for name in ("value", "low", "high"))
        )
        above = "–" if method["by"] == RANDOM else signed_points(method["above_random"])
        rows.append([method["by"], *cells, f"{value} ({low} to {high})", above])
    return rows


def plot(result: Config) -> Figure:
    """Accuracy against labels, mean of the seeds, and what random labels reach in the end."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for method in result["methods"]:
        look = {"color": "#64748b", "linestyle": "--"} if method["by"] == RANDOM else {}
        percent = [100 * value for value in method["accuracy"]]
        axes.plot(result["labels"], percent, marker="o", label=method["by"], **look)
        if method["by"] == RANDOM:
            axes.axhline(percent[-1], color="#94a3b8", linewidth=1)
    axes.set_xlabel("labels")
    axes.set_ylabel("held-out judgments ordered as people did, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run("priorities", measure, tabulate, plot)
