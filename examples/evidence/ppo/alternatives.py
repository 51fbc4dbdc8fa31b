"""What else could be done with the same rankings: DPO, SFT on the best response, best-of-n.

DPO is `rlhf dpo`, SFT `rlhf sft`. All are evaluated by the same command, against the same stored
answers, and compared head to head with PPO (`--against`). Best-of-n needs no training: it chooses
among the stored responses by the reward model, so its row comes from the evaluation of PPO.
"""

from collections.abc import Iterator
from pathlib import Path

from examples.evidence.commands import Config, flags, stage
from examples.evidence.experiment import (
    SHOWN_N,
    Table,
    draw,
    gold_of,
    interval,
    rank_by_signal,
    run,
    sampled_prompts,
    write_dataset,
)
from examples.evidence.ppo.shaping import outcome
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import RankedPrompt

METHODS = ("dpo", "sft")


def measure(config: Config, out: Path) -> Config:
    """Train every method on the same rankings and evaluate it."""
    records = sampled_prompts(config)
    ranked = rank_by_signal(
        records, gold_of(config), size=config["ranking_size"], tie_within=config["tie_within"]
    )
    chosen = draw(ranked, config["rankings"], config["seed"])
    data = write_dataset(out / "rankings", chosen)
    base = ["--model", config["model"]]
    reward, how = out / "reward", flags(config["reward"])
    stage(reward, "train-reward", "--rankings", data, *base, *how)
    reference, best_of = stored_outputs(config, out, records)
    judged = ["--reward", reward, "--reference"]
    stage(out / "ppo", "ppo", *base, *judged, reference, *flags(config["ppo"]))
    asked = [*judged, best_of, "--gold", config["gold"], *flags(config["evaluate"])]
    report = stage(out / "evaluate-ppo", "evaluate", "--policy", out / "ppo", *asked)
    rows = {"ppo": outcome(report)}
    train = [record for record in chosen if record.prompt.split == "train"]
    for method in METHODS:
        policy = trained(method, config, out, train)
        against = ["--against", out / "ppo"]
        found = stage(out / f"evaluate-{method}", "evaluate", "--policy", policy, *against, *asked)
        rows[method] = {**outcome(found), "against_ppo": found["rival"]["win_rate"]["gold"]}
    return {"methods": rows, "best_of_n": report["best_of_n"]}


def stored_outputs(config: Config, out: Path, records: list[RankedPrompt]) -> tuple[Path, Path]:
    """Reference outputs to train with, and many of every test prompt to choose the best of.

    A policy is trained on all its stored rows, so that many of them cost every run time.
    """
    test = [record for record in records if record.prompt.split == "test"]
    parts = (("reference", records, {}), ("best-of", test, {"samples": config["best_of"]}))
    for name, some, more in parts:
        prompts = write_dataset(out / f"{name}-prompts", some)
        how = flags({**config["reference"], **more})
        base = ["--prompts", prompts, "--model", config["model"]]
        stage(out / name, "reference", *base, *how)
    return out / "reference", out / "best-of"


def trained(method: str, config: Config, out: Path, records: list[RankedPrompt]) -> Path:
    """The policy of `rlhf dpo` on all pairs, or of `rlhf sft` on the best response to each prompt.

    The configuration has trl's names. Seed and warmup are trl's defaults.
    """
    settings = config[method]
    how = {
        "learning_rate": settings["learning_rate"],
        "epochs": settings["num_train_epochs"],
        "batch_size": settings["per_device_train_batch_size"],
        "micro_batch_size": settings["per_device_train_batch_size"],
        "warmup_fraction": 0,
        "precision": "bf16" if settings["bf16"] else "fp32",
        "seed": 42,
    }
    if method == "dpo":
        what: list[str | Path] = ["--rankings", out / "rankings", "--beta", str(settings["beta"])]
    else:
        write_jsonl(out / "best.jsonl", best(records))
        what = ["--demonstrations", out / "best.jsonl"]
    stage(out / method, method, *what, "--model", config["model"], *flags(how))
    return out / method


def best(records: list[RankedPrompt]) -> Iterator[Config]:
    """The best response of every ranking that has one alone at the top."""
    for record in records:
        top = record.rankings[0].tiers[0]
        if len(top) == 1:
            text = next(r.text for r in record.responses if r.id == top[0])
            yield {
                "prompt": record.prompt.chat,
                "completion": [{"role": "assistant", "content": text}],
            }


def tabulate(result: Config) -> Table:
    """One row for each method."""
    rows = [["method", "gold win rate (95 %)", "against PPO (95 %)", "gold", "reverse KL, nats"]]
    for name, one in result["methods"].items():
        rows.append(
            [
                name.upper(),
                interval(one["win_rate"]),
                interval(one["against_ppo"]) if "against_ppo" in one else "–",
                f"{one['gold']['policy']:+.2f}",
                f"{one['nats']:.1f}",
            ]
        )
    rows += [
        [f"best of {point['n']}", "–", "–", f"{point['gold']:+.2f}", f"{point['nats']:.1f}"]
        for point in result["best_of_n"]
        if point["n"] in SHOWN_N
    ]
    return rows


if __name__ == "__main__":
    run("alternatives", measure, tabulate)
