"""Gold reward against audited reverse KL, for every source of the KL term.

The same reward model, stored outputs and steps for all; the KL term changes, and with `par` the
shaping of the reward. The adapter needs LoRA, which learns at ten times the rate. Coefficients of
different sources do not compare: that of `reference` weighs a mean over stored tokens beside the
loss, those of `adapter` and `resident` are taken from each sampled token's reward. So all stand in
one plane: what was gained, by the gold function, and how far the policy went for it, by an
evaluation with the original model loaded.
"""

from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from examples.evidence.commands import Config, at_once, flags, stage
from examples.evidence.experiment import (
    Table,
    draw,
    empty_plot,
    gold_of,
    rank_by_signal,
    run,
    sampled_prompts,
    write_dataset,
)


def measure(config: Config, out: Path) -> Config:
    """One PPO run and one evaluation for every source, coefficient and seed."""
    records = sampled_prompts(config)
    everything = write_dataset(out / "prompts", records)
    ranked = rank_by_signal(
        records, gold_of(config), size=config["ranking_size"], tie_within=config["tie_within"]
    )
    data = write_dataset(out / "rankings", draw(ranked, config["rankings"], seed=0))
    model = config["model"]
    reward, reference = out / "reward", out / "reference"
    options = flags(config["reward"])
    stage(reward, "train-reward", "--rankings", data, "--model", model, *options)
    options = ["--reward", reward, *flags(config["reference"])]
    stage(reference, "reference", "--prompts", everything, "--model", model, *options)
    runs = at_once(
        *(
            partial(measure_run, config, out, name, seed)
            for name, source in config["sources"].items()
            for seed in source["seeds"]
        )
    )
    return {"runs": runs}


def measure_run(config: Config, out: Path, name: str, seed: int) -> Config:
    """One PPO run with a source of the KL term, and its evaluation."""
    label = f"{name.replace(' ', '-')}-{seed}"
    policy = out / f"ppo-{label}"
    base = ["--reward", out / "reward", "--reference", out / "reference", "--seed", seed]
    options = flags({**config["ppo"], **config["sources"][name]["ppo"]})
    stage(policy, "ppo", "--model", config["model"], *base, *options)
    report = stage(
        out / f"evaluate-{label}",
        *("evaluate", "--policy", policy, *base, "--gold", config["gold"]),
        *flags(config["evaluate"]),
    )
    return {"source": name, "seed": seed, **outcome(report)}


def outcome(report: Config) -> Config:
    """An evaluation in a few numbers."""
    return {
        "gold": {side: report["gold"][side]["mean"] for side in ("reference", "policy")},
        "win_rate": report["win_rate"]["gold"],
        "reverse": report["kl"]["reverse"]["nats"],
        "forward": report["kl"]["forward"]["nats"],
        "length": report["length"]["policy"],
    }


def by_source(result: Config) -> dict[str, list[Config]]:
    """The runs of each source, in the order in which they ran."""
    groups: dict[str, list[Config]] = {}
    for run_result in result["runs"]:
        groups.setdefault(run_result["source"], []).append(run_result)
    return groups


def plot(result: Config) -> Figure:
    """A point for every run, the larger one of a source their mean."""
    start = fmean(run_result["gold"]["reference"] for run_result in result["runs"])
    figure, axes = empty_plot("audited KL(policy ‖ original), nats per response", start)
    for number, (name, runs) in enumerate(by_source(result).items()):
        nats = [run_result["reverse"] for run_result in runs]
        gold = [run_result["gold"]["policy"] for run_result in runs]
        axes.scatter(nats, gold, color=f"C{number}", s=12)
        axes.scatter(fmean(nats), fmean(gold), color=f"C{number}", s=60, label=name)
    axes.set_xlim(left=0)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def tabulate(result: Config) -> Table:
    """One row for each source; with several seeds, means and what lies between the extremes."""
    kls = [f"{name} KL, nats per response" for name in ("reverse", "forward")]
    rows = [["KL term", "seeds", "gold", *kls, "gold win rate, %"]]
    for name, runs in by_source(result).items():
        gold = [run_result["gold"]["policy"] for run_result in runs]
        rates = [100 * run_result["win_rate"]["value"] for run_result in runs]
        rows.append(
            [
                name,
                str(len(runs)),
                spread(gold, "+.2f"),
                spread([run_result["reverse"] for run_result in runs], ".1f"),
                spread([run_result["forward"] for run_result in runs], ".1f"),
                spread(rates, ".0f"),
            ]
        )
    return rows


def spread(values: list[float], format_spec: str) -> str:
    """A mean and, of several values, the least and the greatest: `+.52 (+.47 to +.58)`."""
    mean = format(fmean(values), format_spec)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), format_spec)} to {format(max(values), format_spec)})"


if __name__ == "__main__":
    run("kl_sources", measure, tabulate, plot)
