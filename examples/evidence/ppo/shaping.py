"""Raw, centred and PAR reward: the same PPO, judged by the gold function (arXiv 2502.18770)."""

from pathlib import Path

from examples.evidence.commands import Config, flags, stage
from examples.evidence.experiment import (
    Table,
    draw,
    gold_of,
    interval,
    rank_by_signal,
    run,
    sampled_prompts,
    write_dataset,
)


def measure(config: Config, out: Path) -> Config:
    """One PPO run and one evaluation for every shaping and seed."""
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
    options = flags(config["reference"])
    stage(reference, "reference", "--prompts", everything, "--model", model, *options)
    rows = []
    for shaping in config["shapings"]:
        for seed in config["seeds"]:
            policy = out / f"ppo-{shaping}-{seed}"
            base = ["--reward", reward, "--reference", reference, "--seed", seed]
            options = [*flags(config["ppo"]), "--reward-shaping", shaping]
            stage(policy, "ppo", "--model", model, *base, *options)
            report = stage(
                out / f"evaluate-{shaping}-{seed}",
                *("evaluate", "--policy", policy, *base, "--gold", config["gold"]),
                *flags(config["evaluate"]),
            )
            rows.append({"shaping": shaping, "seed": seed, **outcome(report)})
    return {"runs": rows}


def outcome(report: Config) -> Config:
    """An evaluation in a few numbers."""
    return {
        "win_rate": report["win_rate"]["gold"],
        "gold": {side: report["gold"][side]["mean"] for side in ("reference", "policy")},
        "reward": {side: report["reward"][side]["mean"] for side in ("reference", "policy")},
        "nats": report["kl"]["reverse"]["nats"],
        "length": report["length"]["policy"],
    }


def tabulate(result: Config) -> Table:
    """One row for each run."""
    rows = [["reward", "seed", "gold win rate (95 %)", "gold", "proxy", "reverse KL, nats"]]
    for run_result in result["runs"]:
        rows.append(
            [
                run_result["shaping"],
                str(run_result["seed"]),
                interval(run_result["win_rate"]),
                *(
                    f"{run_result[name]['reference']:+.2f} → {run_result[name]['policy']:+.2f}"
                    for name in ("gold", "reward")
                ),
                f"{run_result['nats']:.1f}",
            ]
        )
    return rows


if __name__ == "__main__":
    run("shaping", measure, tabulate)
