"""One reward model against an ensemble, with clean rankings and with a quarter turned upside down.

After Coste et al. (arXiv 2310.02743), for best-of-n: the responses to test prompts are chosen by
one member, by the mean of all and by the worst of all, and the gold function judges the choice.
What the ensemble adds is measured against the mean of its members, each choosing alone. Where they
turn single pairs, whole rankings are turned here; the members differ in the order of the data only.
"""

from pathlib import Path

import numpy as np

from examples.evidence.commands import Config, flags, stage
from examples.evidence.experiment import (
    Table,
    draw,
    gold_of,
    rank_by_signal,
    run,
    sampled_prompts,
    score,
    signed,
    with_noise,
    write_dataset,
)
from policies.evaluate.measures.statistics import best_of_n, bootstrap_interval

Rewards = np.ndarray
Scores = np.ndarray


def measure(config: Config, out: Path) -> Config:
    """The gold score of best-of-n for every share of noise and every way to choose."""
    signal = gold_of(config)
    records = sampled_prompts(config)
    ranked = rank_by_signal(
        records, signal, size=config["ranking_size"], tie_within=config["tie_within"]
    )
    chosen = draw(ranked, config["rankings"], seed=0)
    test = [record for record in records if record.prompt.split == "test"]
    gold = np.array([[signal(r.prompt.text, a.text) for a in r.responses] for r in test])
    rows = []
    for noise in config["noise"]:
        data = write_dataset(out / f"rankings-{noise}", with_noise(chosen, noise, seed=0))
        base = ["--rankings", data, "--model", config["model"], *flags(config["reward"])]
        together = out / f"ensemble-{noise}"
        stage(together, "train-reward", *base, "--seeds", ",".join(map(str, config["seeds"])))
        members = [together / f"member-{number}" for number in range(len(config["seeds"]))]
        rewards = np.stack([score(test, member, config["score"]) for member in members])
        disagreement = float(rewards.std(axis=0).mean())
        for n in config["n"]:
            rows.append(
                {"noise": noise, "n": n, "disagreement": disagreement, **choose(rewards, gold, n)}
            )
    return {"start": float(gold.mean()), "runs": rows}


def choose(rewards: Rewards, gold: Scores, n: int) -> Config:
    """Gold score of the best of n responses by one member, and what the ensemble adds to it.

    Args:
        rewards: by each of S members of the M answers to P prompts, shape (S, P, M).
        gold: shape (P, M).
        n: responses to choose among.

    Returns:
        `single`, the mean over members; `mean` and `worst case`, the differences from it, prompt by
        prompt; all with intervals over prompts.
    """
    single = np.mean([best_of_n(member, gold, n) for member in rewards], axis=0)
    ways = {"mean": rewards.mean(axis=0), "worst case": rewards.min(axis=0)}
    values = {way: best_of_n(combined, gold, n) - single for way, combined in ways.items()}
    scores = {"single": single, **values}
    return {name: bootstrap_interval(value, seed=0).to_json() for name, value in scores.items()}


def tabulate(result: Config) -> Table:
    """One row for each share of noise and each n."""
    head = ["noise", "n", "gold, one member", "mean of three adds (95 %)", "worst case adds (95 %)"]
    rows = [head]
    for run_result in result["runs"]:
        added = [signed(run_result[way]) for way in ("mean", "worst case")]
        rows.append(
            [
                f"{100 * run_result['noise']:.0f} %",
                str(run_result["n"]),
                f"{run_result['single']['value']:+.2f}",
                *added,
            ]
        )
    return rows


if __name__ == "__main__":
    run("ensemble", measure, tabulate)
