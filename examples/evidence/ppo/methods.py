"""PPO against its alternatives on people's labels: RLOO, DPO and best-of-n.

Stories, judge and the settings of PPO are those of `people.py`; the labels are fewer, the same for
all: the reward model is trained on them, and DPO learns from them without it. Each method is tried
with as many settings on the validation prompts; of those that stay within a limit of KL, the one
that the judge prefers most is trained with every seed and judged on the test prompts. A method
whose setting is chosen already (`chosen`, its place) is not tried again. Best-of-n sampling chooses
among the stored outputs by the reward model and has nothing to set but n. As methods end at
different KLs, each is also compared with what PPO gains at its KL.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.commands import Config, at_once, flags, stage
from examples.evidence.experiment import SHOWN_N, Table, interval, resolved, run, write_dataset
from examples.evidence.human_labels.people import (
    first_sentences,
    judge_policy,
    prepare,
    read_pairs,
    story_prompts,
)
from rlhf.errors import InputError
from rlhf.records.ranked import read_ranked
from rlhf.run.rundir import RunDir

REFERENCES = {"validation": "reference-validation", "test": "reference"}  # by what is judged on
COLORS = ("#1d4ed8", "#0f766e", "#b45309", "#7e22ce")


def measure(config: Config, out: Path) -> Config:
    """Try every setting of every method, then train the chosen ones with all seeds.

    Raises:
        InputError: `chosen` is not the place of a setting.
    """
    for name, method in config["methods"].items():
        if method.get("chosen", 0) not in range(len(method["tries"])):
            raise InputError(
                f"{name} has {len(method['tries'])} tries, and `chosen` is {method['chosen']}",
                "Give the place of one of them, from 0, or leave it out to try all.",
            )
    people, seed = resolved(config)["people"], config["seeds"][0]
    people.pop("config", None)  # the file that it was read from
    pairs = read_pairs(people["data"])
    firsts = first_sentences(pairs["heldout"])
    is_tuned = all("chosen" in method for method in config["methods"].values())
    stores = {}
    for judged_on, name in REFERENCES.items() if not is_tuned else [("test", REFERENCES["test"])]:
        stories = story_prompts(people | {"judged_on": judged_on}, firsts)
        if judged_on == "validation":  # policies train on the prompts of the other store
            stories = [story for story in stories if story.prompt.split == "test"]
        stores[name] = stories
    accuracies = prepare(people, out, pairs, stores, config["labels"])
    write_pairs(out / "reward-labels", out / "pairs")
    config = config | {"people": people}
    methods = measure_methods(config, out)
    # any policy's report has best-of-n sampling of the stored outputs
    name, first = next(iter(methods.items()))
    any_policy = run_name(name, first["chosen"], seed, "test")
    report = RunDir(out / f"evaluate-{any_policy.removeprefix('ppo-')}").read_report()
    return {"accuracy": accuracies, "methods": methods, "best_of_n": report["best_of_n"]}


def measure_methods(config: Config, out: Path) -> Config:
    """What each setting of each method gave on validation, and the chosen one with every seed.

    Where the choice is already made, no setting is tried.
    """
    methods, seed, seeds = config["methods"], config["tuning_seed"], config["seeds"]
    places = {
        name: () if "chosen" in method else range(len(method["tries"]))
        for name, method in methods.items()
    }
    tries = [(name, place) for name, some in places.items() for place in some]
    done = iter(at_once(*(partial(train, config, out, one, seed, "validation") for one in tries)))
    tried = {name: [next(done) for _ in some] for name, some in places.items()}
    best = {
        name: choose(of, config["max_nats_per_token"]) if of else methods[name]["chosen"]
        for name, of in tried.items()
    }
    chosen = [(one, seed) for one in best.items() for seed in seeds]
    done = iter(at_once(*(partial(train, config, out, one, s, "test") for one, s in chosen)))
    return {
        name: {"tried": of, "chosen": best[name], "runs": [next(done) for _ in seeds]}
        for name, of in tried.items()
    }


def train(config: Config, out: Path, which: tuple[str, int], seed: int, judged_on: str) -> Config:
    """Train one method with one of its settings, and judge its responses."""
    name, place = which
    people, method = config["people"], config["methods"][name]
    command, how = method["command"], method["tries"][place]
    stored = out / REFERENCES["test"]
    inputs: list[str | Path]
    if command == "ppo":
        inputs = ["--reward", out / "reward", "--reference", stored]
        how = people["ppo"] | how
    elif command == "dpo":
        inputs = ["--rankings", out / "pairs"]
    else:
        inputs = ["--best-of", stored]
    policy = out / run_name(name, place, seed, judged_on)
    base = ["--model", people["model"], "--seed", seed]
    stage(policy, command, *base, *inputs, *flags(how))
    return kept(judge_policy(people, policy, out, seed, REFERENCES[judged_on]))


def run_name(method: str, place: int, seed: int, judged_on: str) -> str:
    """The folder of a policy, by method and the place of its setting."""
    return f"{method.replace(' ', '-')}-{place}-{seed}-{judged_on}"


def write_pairs(labels: Path, out: Path) -> None:
    """The labels that the reward model was trained on, without those that it is tested with."""
    write_dataset(out, [record for record in read_ranked(labels) if record.prompt.split == "train"])


def kept(found: Config) -> Config:
    """What is kept of a policy's measures."""
    names = ("seed", "judge", "judge_at_equal_length", "gain", "nats", "nats_per_token")
    return {name: found[name] for name in (*names, "eos_rate", "template")}


def choose(tried: Sequence[Config], max_nats_per_token: float) -> int:
    """The place of the setting that wins most within the KL limit; if none is, of the lowest KL."""
    near = [n for n, one in enumerate(tried) if one["nats_per_token"] <= max_nats_per_token]
    if not near:
        return min(range(len(tried)), key=lambda n: tried[n]["nats_per_token"])
    return max(near, key=lambda n: tried[n]["judge"]["value"])


def root(nats: float) -> float:
    """√KL; estimates just below 0 count as 0."""
    return max(nats, 0.0) ** 0.5


def gain_at(distance: float, runs: Sequence[Config]) -> float | None:
    """The gain of these runs at a value of √KL, linear between them; None beyond the largest.

    The line begins at the original model, with no gain and no KL.
    """
    points = sorted((root(one["nats"]), one["gain"]) for one in runs)
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
    """A row for each seed of each method, with what PPO gains at the same KL."""
    header = ["method", "setting", "seed", "won, by the judge (95 %)", "at equal length"]
    header += ["gain by the judge", "PPO's gain at that KL", "reverse KL, nats"]
    rows = [[*header, "responses that end", "with the most frequent 4-gram"]]
    ppo = result["methods"]["ppo"]["runs"]
    for name, of in result["methods"].items():
        setting = f"{of['chosen'] + 1} of {len(result['config']['methods'][name]['tries'])}"
        for one in of["runs"]:
            rates = [interval(one[key]) for key in ("judge", "judge_at_equal_length")]
            shares = one["eos_rate"]["policy"], one["template"]["policy"]["share"]
            cells = [f"{one['gain']:+.2f}", beside(name, one, ppo), f"{one['nats']:.1f}"]
            cells += [f"{100 * share:.0f} %" for share in shares]
            rows.append([name, setting, str(one["seed"]), *rates, *cells])
    for point in best_of(result):
        if point["n"] in SHOWN_N:
            cells = [f"{point['gain']:+.2f}", beside("", point, ppo), f"{point['nats']:.1f}"]
            rows.append([f"best of {point['n']}", "–", "–", "–", "–", *cells, "–", "–"])
    return rows


def beside(name: str, one: Config, ppo: Sequence[Config]) -> str:
    """PPO's gain at the KL of another method, as a cell."""
    gain = None if name == "ppo" else gain_at(root(one["nats"]), ppo)
    return "–" if gain is None else f"{gain:+.2f}"


def plot(result: Config) -> Figure:
    """Gain against √KL: a point for each setting and seed, and the line of best-of-n."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for color, (name, of) in zip(COLORS, result["methods"].items(), strict=False):
        for runs, face, label in ((of["tried"], "none", None), (of["runs"], color, name)):
            x, y = [root(one["nats"]) for one in runs], [one["gain"] for one in runs]
            axes.scatter(x, y, s=42, edgecolors=color, facecolors=face, label=label)
    curve = best_of(result)
    x, y = [root(point["nats"]) for point in curve], [point["gain"] for point in curve]
    axes.plot(x, y, color="#64748b", linewidth=1.2, label=f"best of 1 to {curve[-1]['n']}")
    axes.axhline(0, color="#94a3b8", linewidth=1)
    has_tries = any(of["tried"] for of in result["methods"].values())
    hollow = " (hollow: settings tried on validation prompts)" if has_tries else ""
    axes.set_xlabel(f"√ of the reverse KL, nats{hollow}")
    axes.set_ylabel("gain in the score of other people's labels")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run("methods", measure, tabulate, plot)
