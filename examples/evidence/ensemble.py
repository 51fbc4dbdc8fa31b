"""One reward model against an ensemble, with clean rankings and with a quarter turned upside down.

After Coste et al. (arXiv 2310.02743), for best-of-n: the answers to the test prompts are chosen by
one member, by the mean of all and by the worst of all, and the gold function judges the choice.
"""

from pathlib import Path

import numpy as np
from experiment import (
    Config,
    Table,
    draw,
    flags,
    gold_of,
    rank_by_signal,
    rlhf,
    run,
    sampled_prompts,
    stage,
    with_noise,
    write_dataset,
)

from policies.statistics import best_of_n, bootstrap_interval
from rlhf.jsonl import read_jsonl, write_jsonl
from rlhf.records import RankedPrompt

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
        seeds = ",".join(map(str, config["seeds"]))
        together = out / f"ensemble-{noise}"
        stage(together, "train-reward", *base, "--seeds", seeds)
        alone = together / "member-0"
        for name, reward, combine in (
            ("single", alone, "mean"),
            ("mean", together, "mean"),
            ("worst case", together, "min"),
        ):
            scored = score(
                out / f"scores-{noise}-{combine}-{reward.name}",
                test,
                reward,
                combine,
                config["score"],
            )
            for n in config["n"]:
                values = best_of_n(scored, gold, n)
                found = bootstrap_interval(values, seed=0).to_json()
                rows.append({"noise": noise, "reward": name, "n": n, "gold": found})
    return {"start": float(gold.mean()), "runs": rows}


def score(
    out: Path, records: list[RankedPrompt], reward: Path, combine: str, how: Config
) -> Scores:
    """The rewards (P, M) of all answers of some prompts."""
    answers, found = out / "answers.jsonl", out / "scored.jsonl"
    if not found.exists():
        write_jsonl(answers, (record.to_json() for record in records))
        base = ["--reward", reward, "--combine", combine, "--out", found]
        rlhf("score", answers, *base, *flags(how))
    return np.array([line["rewards"] for line in read_jsonl(found)])


def tabulate(result: Config) -> Table:
    """One row for each share of noise and each n; the ways to choose side by side."""
    names = list(dict.fromkeys(one["reward"] for one in result["runs"]))
    rows = [["noise", "n", *(f"gold, {name} (95 %)" for name in names)]]
    for noise, n in dict.fromkeys((one["noise"], one["n"]) for one in result["runs"]):
        cells = [
            f"{one['gold']['value']:+.2f} ({one['gold']['low']:+.2f} to {one['gold']['high']:+.2f})"
            for one in result["runs"]
            if (one["noise"], one["n"]) == (noise, n)
        ]
        rows.append([f"{100 * noise:.0f} %", str(n), *cells])
    return rows


if __name__ == "__main__":
    run("ensemble", measure, tabulate)
