"""PPO against its alternatives on people's labels: RLOO, DPO and best-of-n.

Stories, judge and the settings of PPO are those of `people.py`; the labels are fewer, the same for
all: the reward model is trained on them, and DPO learns from them without it. Each method is
trained with every seed at one of its settings, `chosen` (its place among `tries`), which
`method_settings.py` found on validation prompts, and judged on the test prompts. Best-of-n sampling
chooses among the stored outputs by the reward model and has nothing to set but n. As methods end at
different KLs, they are also compared at equal ones.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.commands import Config, at_once, flags, stage
from examples.evidence.experiment import SHOWN_N, Table, interval, resolved, run, write_dataset
from examples.evidence.human_labels.ethics import first_sentences, read_pairs
from examples.evidence.human_labels.people import judge_policy, prepare, story_prompts
from rlhf.errors import InputError
from rlhf.records.ranked import read_ranked
from rlhf.run.rundir import RunDir

COMPARED_AT = (1.0, 4.0, 7.0)  # nats
COLORS = ("#1d4ed8", "#0f766e", "#b45309", "#7e22ce")

Trained = tuple[str, int, int]  # method, index of its setting, seed


def measure(config: Config, out: Path) -> Config:
    """Train every method at its chosen setting with all seeds.

    Raises:
        InputError: `chosen` is missing, or not the place of a setting.
    """
    for name, method in config["methods"].items():
        if method.get("chosen") not in range(len(method["tries"])):
            raise InputError(
                f"{name} has {len(method['tries'])} tries, and `chosen` is {method.get('chosen')}",
                "Give the place of one of them, from 0.",
            )
    seeds = config["seeds"]
    results = train_all(
        config,
        out,
        [(name, of["chosen"], seed) for name, of in config["methods"].items() for seed in seeds],
    )
    runs = iter(results.pop("runs"))
    methods = {
        name: {"chosen": of["chosen"], "runs": [next(runs) for _ in seeds]}
        for name, of in config["methods"].items()
    }
    return {**results, "methods": methods}


def train_all(config: Config, out: Path, policies: Sequence[Trained]) -> Config:
    """Train reward model and judge, store responses, then train and judge these policies.

    Returns:
        `accuracy` of reward model and judge, `runs` in the order of `policies`, and `best_of_n` of
        the stored responses.
    """
    people = resolved(config)["people"]
    people.pop("config", None)  # the file that it was read from
    pairs = read_pairs(people["data"])
    stories = story_prompts(people, first_sentences(pairs["heldout"]))
    accuracies = prepare(people, out, pairs, stories, config["labels"])
    write_pairs(out / "reward-labels", out / "pairs")
    config = config | {"people": people}
    runs = at_once(*(partial(train, config, out, *policy) for policy in policies))
    # any policy's report has best-of-n sampling of the stored outputs
    any_policy = run_name(*policies[0]).removeprefix("ppo-")
    report = RunDir(out / f"evaluate-{any_policy}").read_report()
    return {"accuracy": accuracies, "runs": runs, "best_of_n": report["best_of_n"]}


def train(config: Config, out: Path, name: str, index: int, seed: int) -> Config:
    """Train one method with one of its settings, and judge its responses."""
    people, method = config["people"], config["methods"][name]
    command, settings = method["command"], method["tries"][index]
    stored = out / "reference"
    inputs: list[str | Path]
    if command == "ppo":
        inputs = ["--reward", out / "reward", "--reference", stored]
        settings = people["ppo"] | settings
    elif command == "dpo":
        inputs = ["--rankings", out / "pairs"]
    else:
        inputs = ["--best-of", stored]
    policy = out / run_name(name, index, seed)
    base = ["--model", people["model"], "--seed", seed]
    stage(policy, command, *base, *inputs, *flags(settings))
    return kept(judge_policy(people, policy, out, seed))


def run_name(method: str, index: int, seed: int) -> str:
    """The folder of a policy, by method, index of its setting, and seed."""
    return f"{method.replace(' ', '-')}-{index}-{seed}"


def write_pairs(labels: Path, out: Path) -> None:
    """The labels that the reward model was trained on, without those that it is tested with."""
    write_dataset(out, [record for record in read_ranked(labels) if record.prompt.split == "train"])


def kept(measured: Config) -> Config:
    """The measures of a policy that the result keeps."""
    names = ("seed", "judge", "judge_at_equal_length", "gain", "nats", "nats_per_token")
    return {name: measured[name] for name in (*names, "eos_rate", "template")}


def root(nats: float) -> float:
    """√KL; estimates just below 0 count as 0."""
    return max(nats, 0.0) ** 0.5


def gain_at(distance: float, runs: Sequence[Config]) -> float | None:
    """The gain of these runs at a value of √KL, linear between them; None beyond the largest.

    The line begins at the original model, with no gain and no KL.
    """
    points = sorted((root(run_result["nats"]), run_result["gain"]) for run_result in runs)
    if distance > points[-1][0]:
        return None
    distances, gains = zip((0.0, 0.0), *points, strict=True)
    return float(np.interp(distance, distances, gains))


def best_of(result: Config) -> list[Config]:
    """Best-of-n sampling as points of gain and KL."""
    points = result["best_of_n"]
    start = points[0]["gold"]
    return [{**point, "gain": point["gold"] - start} for point in points]


def tabulate(result: Config) -> Table:
    """A row for each seed of each method."""
    header = ["method", "setting", "seed", "won, by the judge (95 %)", "at equal length"]
    header += ["gain by the judge", "reverse KL, nats", "responses that end"]
    rows = [[*header, "with the most frequent 4-gram"]]
    for name, of in result["methods"].items():
        setting = f"{of['chosen'] + 1} of {len(result['config']['methods'][name]['tries'])}"
        for run_result in of["runs"]:
            rows.append([name, setting, str(run_result["seed"]), *measures(run_result)])
    for point in best_of(result):
        if point["n"] in SHOWN_N:
            cells = [f"{point['gain']:+.2f}", f"{point['nats']:.1f}"]
            rows.append([f"best of {point['n']}", "–", "–", "–", "–", *cells, "–", "–"])
    return rows


def measures(run_result: Config) -> list[str]:
    """The cells of a policy: win rates, gain, KL, the shares that end and that have the 4-gram."""
    rates = [interval(run_result[key]) for key in ("judge", "judge_at_equal_length")]
    shares = run_result["eos_rate"]["policy"], run_result["template"]["policy"]["share"]
    cells = [f"{run_result['gain']:+.2f}", f"{run_result['nats']:.1f}"]
    return [*rates, *cells, *(f"{100 * share:.0f} %" for share in shares)]


def at_equal_kl(result: Config) -> Table:
    """The gain of every method at the same KLs, between its policies."""
    methods = {name: of["runs"] for name, of in result["methods"].items()}
    methods["best-of-n sampling"] = best_of(result)
    rows = [["gain by the judge at a reverse KL of", *methods]]
    for nats in COMPARED_AT:
        gains = [gain_at(root(nats), runs) for runs in methods.values()]
        cells = ["–" if gain is None else f"{gain:+.2f}" for gain in gains]
        rows.append([f"{nats:.0f} nats" if nats > 1 else "1 nat", *cells])
    return rows


def plot(result: Config) -> Figure:
    """Gain against √KL: a point for each setting and seed, and the line of best-of-n."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for color, (name, of) in zip(COLORS, result["methods"].items(), strict=False):
        x, y = (
            [root(run_result["nats"]) for run_result in of["runs"]],
            [run_result["gain"] for run_result in of["runs"]],
        )
        axes.scatter(x, y, s=42, color=color, label=name)
    curve = best_of(result)
    x, y = [root(point["nats"]) for point in curve], [point["gain"] for point in curve]
    axes.plot(x, y, color="#64748b", linewidth=1.2, label=f"best of 1 to {curve[-1]['n']}")
    axes.axhline(0, color="#94a3b8", linewidth=1)
    axes.set_xlabel("√ of the reverse KL, nats")
    axes.set_ylabel("gain in the score of other people's labels")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run("methods", measure, tabulate, plot, compare=at_equal_kl)
