"""PPO against its alternatives on people's labels: RLOO, DPO and best-of-n.

Labels, reward model, judge and stories are those of `people.py`. Each method is tried with as many
settings on the validation beginnings; of those that stay within a distance, the one that the judge
prefers most is trained with every seed and judged on the test beginnings. Best-of-n sampling
chooses among the stored outputs by the reward model and has nothing to set but n. As methods go
different distances, each is also compared with what PPO gains at its distance.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.experiment import (
    SHOWN_N,
    Config,
    Table,
    flags,
    interval,
    run,
    stage,
    write_dataset,
)
from examples.evidence.human_labels.people import (
    first_sentences,
    read_pairs,
    story_prompts,
    train_reward,
)

TUNING, FINAL = "validation", "test"  # which beginnings are judged on
COLORS = ("#1d4ed8", "#0f766e", "#b45309", "#7e22ce")


def measure(config: Config, out: Path) -> Config:
    """Try every setting of every method, then train the chosen ones with all seeds."""
    pairs = read_pairs(config["data"])
    accuracies = {
        "reward": train_reward(config, pairs, "A", out / "reward"),
        "judge": train_reward(config, pairs, "B", out / "judge"),
    }
    firsts = first_sentences(pairs["heldout"])
    for judged_on in (TUNING, FINAL):
        prompts = story_prompts(config | {"judged_on": judged_on}, firsts)
        data = write_dataset(out / f"{judged_on}-prompts", prompts)
        base = ["--prompts", data, "--model", config["model"], "--reward", out / "reward"]
        stage(out / f"reference-{judged_on}", "reference", *base, *flags(config["reference"]))
    methods = {name: measure_method(config, out, name) for name in config["methods"]}
    [first, *_] = next(iter(methods.values()))["runs"]
    return {"accuracy": accuracies, "methods": methods, "best_of_n": first.pop("best_of_n")}


def measure_method(config: Config, out: Path, name: str) -> Config:
    """What each setting gave on validation, and the chosen one with every seed."""
    tries = config["methods"][name]["tries"]
    seed = config["tuning_seed"]
    tried = [train(config, out, (name, place), seed, TUNING) for place in range(len(tries))]
    best = choose(tried, config["max_nats_per_token"])
    runs = [train(config, out, (name, best), seed, FINAL) for seed in config["seeds"]]
    for one in (*tried, *runs[1:]):
        one.pop("best_of_n")
    return {"tried": tried, "chosen": best, "runs": runs}


def train(config: Config, out: Path, which: tuple[str, int], seed: int, judged_on: str) -> Config:
    """Train one method with one of its settings, and judge its answers."""
    name, place = which
    method, reference = config["methods"][name], out / f"reference-{judged_on}"
    command, how = method["command"], method["tries"][place]
    inputs: dict[str, list[str | Path]] = {
        "ppo": ["--reward", out / "reward", "--reference", reference],
        "dpo": ["--rankings", out / "reward-labels"],
        "sft": ["--best-of", reference],
    }
    if command == "ppo":
        how = config["common"] | how
    run_name = f"{name.replace(' ', '-')}-{place}-{seed}-{judged_on}"
    base = ["--model", config["model"], "--seed", seed]
    stage(out / run_name, command, *base, *inputs[command], *flags(how))
    judged = ["--reward", out / "reward", "--gold", out / "judge", "--seed", seed]
    report = stage(
        out / f"evaluate-{run_name}",
        *("evaluate", "--policy", out / run_name, "--reference", reference),
        *(*judged, *flags(config["evaluate"])),
    )
    kl, gold = report["kl"]["reverse"], report["gold"]
    return {
        "seed": seed,
        "judge": report["win_rate"]["gold"],
        "judge_at_equal_length": report["win_rate"]["gold"]["length_controlled"],
        "gain": gold["policy"]["mean"] - gold["reference"]["mean"],
        "nats": kl["nats"],
        "nats_per_token": kl["per_token"],
        "eos_rate": report["eos_rate"],
        "best_of_n": report["best_of_n"],
    }


def choose(tried: Sequence[Config], max_nats_per_token: float) -> int:
    """The place of the setting that wins most within the distance; if none is, of the nearest."""
    near = [n for n, one in enumerate(tried) if one["nats_per_token"] <= max_nats_per_token]
    if not near:
        return min(range(len(tried)), key=lambda n: tried[n]["nats_per_token"])
    return max(near, key=lambda n: tried[n]["judge"]["value"])


def root(nats: float) -> float:
    """√KL; estimates just below 0 count as 0."""
    return max(nats, 0.0) ** 0.5


def gain_at(distance: float, runs: Sequence[Config]) -> float | None:
    """The gain of these runs at a distance √KL, linear between them; None beyond the furthest.

    The line begins at the original model, which has gained nothing at no distance.
    """
    points = sorted((root(one["nats"]), one["gain"]) for one in runs)
    if distance > points[-1][0]:
        return None
    distances, gains = zip((0.0, 0.0), *points, strict=True)
    return float(np.interp(distance, distances, gains))


def best_of(result: Config) -> list[Config]:
    """Best-of-n sampling as points of gain and distance."""
    points = result["best_of_n"]
    start = points[0]["gold"]
    return [{**point, "gain": point["gold"] - start} for point in points]


def tabulate(result: Config) -> Table:
    """A row for each seed of each method, with what PPO gains at the same distance."""
    header = ["method", "setting", "seed", "won, by the judge (95 %)", "at equal length"]
    header += ["gain by the judge", "PPO's gain at that distance", "reverse KL, nats"]
    rows = [[*header, "answers that end"]]
    ppo = result["methods"]["ppo"]["runs"]
    for name, of in result["methods"].items():
        setting = f"{of['chosen'] + 1} of {len(of['tried'])}"
        for one in of["runs"]:
            rates = [interval(one[key]) for key in ("judge", "judge_at_equal_length")]
            ends = one["eos_rate"]
            cells = [f"{one['gain']:+.2f}", beside(name, one, ppo), f"{one['nats']:.1f}"]
            cells.append(f"{100 * ends['reference']:.0f} → {100 * ends['policy']:.0f} %")
            rows.append([name, setting, str(one["seed"]), *rates, *cells])
    for point in best_of(result):
        if point["n"] in SHOWN_N:
            cells = [f"{point['gain']:+.2f}", beside("", point, ppo), f"{point['nats']:.1f}"]
            rows.append([f"best of {point['n']}", "–", "–", "–", "–", *cells, "–"])
    return rows


def beside(name: str, one: Config, ppo: Sequence[Config]) -> str:
    """PPO's gain at the distance of another method, as a cell."""
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
    axes.set_xlabel("√ of the reverse KL, nats (hollow: settings tried on validation beginnings)")
    axes.set_ylabel("gain in the score of other people's labels")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run("methods", measure, tabulate, plot)
