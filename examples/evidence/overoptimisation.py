"""Gold reward against √KL for best-of-n and PPO, with proxies of 100, 400 and 1600 rankings.

After Gao et al. (arXiv 2210.10760): the proxy is a reward model trained on rankings by the gold
function. With d = √KL they fit gold = d·(α − β·d) to best-of-n and gold = d·(α − β·log d) to PPO.
Here both are fitted by least squares to the gold reward less that of the original model. Each PPO
point is a run of its own, because the learning rate is annealed over the run.
"""

from pathlib import Path
from statistics import fmean

import numpy as np
from experiment import (
    Config,
    Table,
    draw,
    empty_plot,
    flags,
    gain,
    gold_of,
    rank_by_signal,
    run,
    sampled_prompts,
    signed,
    stage,
    stored_outputs,
    write_dataset,
)
from matplotlib.figure import Figure

FORMS = {"best_of_n": "linear", "ppo": "log"}  # of the fitted curve


def measure(config: Config, out: Path) -> Config:
    """Points of both methods and the fitted curves, for every size of the proxy's data."""
    records = sampled_prompts(config)
    ranked = rank_by_signal(
        records, gold_of(config), size=config["ranking_size"], tie_within=config["tie_within"]
    )
    stores = stored_outputs(config, out, records)
    proxies = {}
    for number in config["rankings"]:
        data = write_dataset(out / f"rankings-{number}", draw(ranked, number, config["seed"]))
        reward = out / f"reward-{number}"
        how = flags(config["reward"])
        base = ["--rankings", data, "--model", config["model"]]
        trained = stage(reward, "train-reward", *base, *how)
        proxies[str(number)] = {
            "accuracy": trained["accuracy"]["value"],  # several rankings a prompt: no interval
            **measure_proxy(config, out, reward, stores, str(number)),
        }
    return {"proxies": proxies}


def measure_proxy(
    config: Config, out: Path, reward: Path, stores: tuple[Path, Path], name: str
) -> Config:
    """Best-of-n and PPO against one proxy, with the stored outputs to train and to evaluate."""
    ppo, best_of_n, start = [], [], 0.0
    reference, best_of = stores
    judged = ["--reward", reward, "--seed", config["seed"], "--reference"]
    for steps in config["steps"]:
        policy = out / f"ppo-{name}-{steps}"
        how = [*flags(config["ppo"]), "--steps", steps]
        stage(policy, "ppo", "--model", config["model"], *judged, reference, *how)
        report = stage(
            out / f"evaluate-{name}-{steps}",
            *("evaluate", "--policy", policy, *judged, best_of, "--gold", config["gold"]),
            *flags(config["evaluate"]),
        )
        kl = report["kl"]["reverse"]
        ppo.append(
            {
                "steps": steps,
                "nats": kl["nats"],
                "sqrt_nats": kl["sqrt_nats"],
                "gold": report["gold"]["policy"]["mean"],
                "proxy": report["reward"]["policy"]["mean"],
                "gain": gain(report),
            }
        )
        best_of_n, start = report["best_of_n"], report["gold"]["reference"]["mean"]
    best = [{**point, "sqrt_nats": point["nats"] ** 0.5} for point in best_of_n]
    points = {"best_of_n": best, "ppo": ppo}
    fitted = {method: fit(points[method], start, form) for method, form in FORMS.items()}
    return {"start": start, **points, "fit": fitted}


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
    """What β multiplies, beside d."""
    return np.log(d) if form == "log" else d


def plot(result: Config) -> Figure:
    """The points of every proxy, PPO filled and best-of-n hollow, with the fitted curves."""
    proxies = result["proxies"]
    start = fmean(proxy["start"] for proxy in proxies.values())
    figure, axes = empty_plot("√KL(policy ‖ original), nats a response", start)
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
        "proxy accuracy",
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
                if not point["sqrt_nats"]:
                    continue
                label = f"best of {point['n']}" if "n" in point else f"PPO, {point['steps']} steps"
                rows.append(
                    [
                        number,
                        f"{100 * proxy['accuracy']:.0f} %",
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
    run("overoptimisation", measure, tabulate, plot)
