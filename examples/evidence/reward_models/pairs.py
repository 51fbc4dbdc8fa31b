"""All pairs of a prompt in one batch element against shuffled pairs.

InstructGPT (arXiv 2203.02155, section 3.5) reports that pairs shuffled into one dataset over-fit
in a single epoch, because each response is then seen K − 1 times. Both see the same pairs here, in
steps of the same number of pairs, at the same learning rate. Over-fitting would show as a lower
accuracy, or as probabilities that are too sure of themselves (expected calibration error).
"""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

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
from rlhf.records.schema import RankedPrompt


def measure(config: Config, out: Path) -> Config:
    """Held-out accuracy for both forms, every number of epochs and every seed."""
    size = config["ranking_size"]
    records = sampled_prompts(config)
    ranked = rank_by_signal(records, gold_of(config), size=size, tie_within=config["tie_within"])
    whole = draw(ranked, config["rankings"], seed=0)
    forms = {"together": (whole, 1), "shuffled": (apart(whole), size * (size - 1) // 2)}
    rows = []
    for form, (content, pairs_each) in forms.items():
        data = write_dataset(out / form, content)
        for epochs in config["epochs"]:
            for seed in config["seeds"]:
                trained = stage(
                    out / f"reward-{form}-{epochs}-{seed}",
                    *("train-reward", "--rankings", data, "--model", config["model"]),
                    *("--epochs", epochs, "--seed", seed),
                    *("--prompts-per-batch", config["prompts_per_batch"] * pairs_each),
                    *flags(config["reward"]),
                )
                row = {"form": form, "epochs": epochs, "seed": seed}
                ece = trained["health"]["calibration"]["ece"]
                rows.append({**row, "accuracy": trained["accuracy"], "ece": ece})
    return {"runs": rows}


def apart(records: list[RankedPrompt]) -> list[RankedPrompt]:
    """Every training pair as a record of its own; test records stay whole, for one measure."""
    pair_records = []
    for record in records:
        if record.prompt.split == "test":
            pair_records.append(record)
            continue
        [ranking] = record.rankings
        tier_of = {id_: index for index, tier in enumerate(ranking.tiers) for id_ in tier}
        for number, pair in enumerate(combinations(record.responses, 2)):
            id_ = f"{record.prompt.id}-{number}"
            first, second = sorted((r.id for r in pair), key=lambda i: tier_of[i])
            tied = tier_of[first] == tier_of[second]
            tiers = ((first, second),) if tied else ((first,), (second,))
            pair_records.append(
                RankedPrompt(
                    prompt=replace(record.prompt, id=id_),
                    responses=tuple(replace(response, prompt_id=id_) for response in pair),
                    rankings=(replace(ranking, id=id_, prompt_id=id_, tiers=tiers),),
                )
            )
    order = np.random.default_rng(0).permutation(len(pair_records))
    return [pair_records[index] for index in order]


def tabulate(result: Config) -> Table:
    """One row for each run."""
    rows = [["pairs", "epochs", "seed", "held-out accuracy (95 %)", "calibration error"]]
    for run_result in result["runs"]:
        kind = [run_result["form"], str(run_result["epochs"]), str(run_result["seed"])]
        rows.append([*kind, interval(run_result["accuracy"]), f"{run_result['ece']:.2f}"])
    return rows


if __name__ == "__main__":
    run("pairs", measure, tabulate)
