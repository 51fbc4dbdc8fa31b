"""Gold reward against √KL for best-of-n and PPO, with proxies of 100, 400 and 1600 rankings.

After Gao et al. (arXiv 2210.10760): the proxy is a reward model trained on rankings by the gold
function. With d = √KL they fit gold = d·(α − β·d) to best-of-n and gold = d·(α − β·log d) to PPO.
Here both are fitted by least squares to the gold reward less that of the original model. Each PPO
point is a run of its own, because the learning rate is annealed over the run.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from examples.evidence.commands import Config, flags, rlhf, stage
from examples.evidence.experiment import (
    SHOWN_N,
    Table,
    draw,
    empty_plot,
    gold_of,
    interval,
    rank_by_signal,
    run,
    sampled_prompts,
    score,
    signed,
    together,
    write_dataset,
)
from policies.evaluate.measures.statistics import bootstrap_interval
from policies.evaluate.summary import best_of_n_curve
from rlhf.records.ranked import read_ranked_file
from rlhf.records.schema import RankedPrompt
from rlhf.run.rundir import RunDir

FORMS = {"best_of_n": "linear", "ppo": "log"}  # of the fitted curve


def measure(config: Config, out: Path) -> Config:
    """Points of both methods and the fitted curves, for every size of the proxy's data."""
    signal, base = gold_of(config), ["--model", config["model"]]
    records = sampled_prompts(config)
    size, tie_within = config["ranking_size"], config["tie_within"]
    train = [record for record in records if record.prompt.split == "train"]
    test = [record for record in records if record.prompt.split == "test"]
    held_out = [replace(record, responses=record.responses[:size]) for record in test]
    ranked = rank_by_signal([*train, *held_out], signal, size=size, tie_within=tie_within)
    gold = np.array([[signal(r.prompt.text, a.text) for a in r.responses] for r in test])
    prompts = write_dataset(out / "reference-prompts", records)
    options = ["--prompts", prompts, *base, *flags(config["reference"])]
    stage(out / "reference", "reference", *options)
    proxies = {}
    for number in config["rankings"]:
        drawn = together(draw(ranked, number, config["seed"]))
        data = write_dataset(out / f"rankings-{number}", drawn)
        reward = out / f"reward-{number}"
        options = ["--rankings", data, *base, *flags(config["reward"])]
        stage(reward, "train-reward", *options)
        rewards = score(test, reward, config["score"])
        scores = {"reward": {"reference": rewards}, "gold": {"reference": gold}}
        best = [{**point, "sqrt_nats": point["nats"] ** 0.5} for point in best_of_n_curve(scores)]
        points = {"best_of_n": best, "ppo": train_policies(config, out, number, test, gold)}
        start = float(gold.mean())
        proxies[str(number)] = {
            "accuracy": accuracy(rewards, gold, tie_within),
            "start": start,
            **points,
            "fit": {method: fit(points[method], start, form) for method, form in FORMS.items()},
        }
    return {"proxies": proxies}


def accuracy(rewards: np.ndarray, gold: np.ndarray, tie_within: float) -> Config:
    """How often a proxy agrees with the gold function on pairs of responses, near ties aside.

    Args:
        rewards: by the proxy, shape (P, M).
        gold: what the responses are worth, of the same shape.
        tie_within: responses that differ by no more are as good.
    """
    better = gold[:, :, None] - gold[:, None, :] > tie_within
    agreed = (rewards[:, :, None] > rewards[:, None, :]) & better
    has_order = better.any(axis=(1, 2))
    shares = agreed[has_order].sum(axis=(1, 2)) / better[has_order].sum(axis=(1, 2))
    return bootstrap_interval(shares, seed=0).to_json()


def train_policies(
    config: Config, out: Path, number: int, test: list[RankedPrompt], gold: np.ndarray
) -> list[Config]:
    """A point of PPO against a proxy for each number of steps.

    Args:
        config: of the experiment.
        out: its folder, with the proxy and the stored outputs.
        number: of rankings that the proxy was trained on.
        test: the test prompts.
        gold: what the original model's responses to them are worth, shape (P, M).
    """
    reference, reward = out / "reference", out / f"reward-{number}"
    judged = ["--reward", reward, "--reference", reference, "--seed", config["seed"]]
    policies = {steps: out / f"ppo-{number}-{steps}" for steps in config["steps"]}
    if not all(RunDir(policy).is_done for policy in policies.values()):
        options = ["--reward", reward, "--replace-reward", *flags(config["score"])]
        rlhf("reference", "--out", reference, *options)  # once for all policies
    points = []
    for steps, policy in policies.items():
        options = [*flags(config["ppo"]), "--steps", steps]
        stage(policy, "ppo", "--model", config["model"], *judged, *options)
        evaluated = out / f"evaluate-{number}-{steps}"
        options = ["--gold", config["gold"], *flags(config["evaluate"])]
        report = stage(evaluated, "evaluate", "--policy", policy, *judged, *options)
        answered = [record.prompt.id for record in read_ranked_file(RunDir(evaluated).answers)]
        assert answered == [record.prompt.id for record in test]
        policy_gold = np.reshape(report["scores"]["gold"]["policy"], (len(test), -1)).mean(axis=1)
        points.append(
            {
                "steps": steps,
                "nats": report["kl"]["reverse"]["nats"],
                "sqrt_nats": report["kl"]["reverse"]["sqrt_nats"],
                "gold": report["gold"]["policy"]["mean"],
                "proxy": report["reward"]["policy"]["mean"],
                "gain": bootstrap_interval(policy_gold - gold.mean(axis=1), seed=0).to_json(),
            }
        )
    return points


def fit(points: list[Config], start: float, form: str) -> Config | None:
    """α and β of Gao et al., by least squares; None with fewer than two points off the origin."""
    moved = [point for point in points if point["sqrt_nats"] > 0]
    if len(moved) < 2:
        return None
    d = np.array([point["sqrt_nats"] for point in moved])
    gain = np.array([point["gold"] for point in moved]) - start
    columns = np.stack([d, -d * bent(d, form)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, gain, rcond=None)
    return {"alpha": float(alpha), "beta": float(beta)}


def curve(d: np.ndarray, start: float, fitted: Config, form: str) -> np.ndarray:
    """The gold reward at each d = √KL > 0 by a fitted curve."""
    gold: np.ndarray = start + d * (fitted["alpha"] - fitted["beta"] * bent(d, form))
    return gold


def bent(d: np.ndarray, form: str) -> np.ndarray:
    """The factor of β, beside d."""
    return np.log(d) if form == "log" else d


def plot(result: Config) -> Figure:
    """The points of every proxy, PPO filled and best-of-n hollow, with the fitted curves."""
    proxies = result["proxies"]
    start = fmean(proxy["start"] for proxy in proxies.values())
    figure, axes = empty_plot("√KL(policy ‖ original), nats per response", start)
    for number, (name, proxy) in enumerate(proxies.items()):
        for method, form in FORMS.items():
            points = [point for point in proxy[method] if point["sqrt_nats"] > 0]
            if not points:
                continue
            d = [point["sqrt_nats"] for point in points]
            gold = [point["gold"] for point in points]
            best = method == "best_of_n"
            colour = f"C{number}"
            fill = "none" if best else colour
            label = f"{name} rankings, {'best of n' if best else 'PPO'}"
            axes.scatter(d, gold, s=24, color=colour, facecolors=fill, label=label)
            if fitted := proxy["fit"][method]:
                grid = np.linspace(0.05, max(d), 100)
                style = "--" if best else "-"
                axes.plot(grid, curve(grid, start, fitted, form), style, color=colour, linewidth=1)
    axes.set_xlim(left=0)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def tabulate(result: Config) -> Table:
    """One row for each point, and the fitted curve at each method's first."""
    head = [
        "rankings",
        "proxy accuracy (95 %)",
        "method",
        "√KL",
        "gold",
        "gained (95 %)",
        "proxy",
        "α",
        "β",
    ]
    rows = [head]
    for number, proxy in result["proxies"].items():
        for method in FORMS:
            fitted = proxy["fit"][method]
            curve = [f"{fitted[name]:.2f}" for name in ("alpha", "beta")] if fitted else ["–", "–"]
            for point in proxy[method]:
                if not point["sqrt_nats"] or point.get("n", 2) not in SHOWN_N:
                    continue
                label = f"best of {point['n']}" if "n" in point else f"PPO, {point['steps']} steps"
                rows.append(
                    [
                        number,
                        interval(proxy["accuracy"]),
                        label,
                        f"{point['sqrt_nats']:.2f}",
                        f"{point['gold']:+.2f}",
                        signed(point["gain"]) if "gain" in point else "–",
                        f"{point['reward' if 'n' in point else 'proxy']:+.2f}",
                        *curve,
                    ]
                )
                curve = ["", ""]
    return rows


if __name__ == "__main__":
    run("overoptimization", measure, tabulate, plot)
