"""What else could be done with the same rankings: DPO, SFT on the best response, best-of-n.

DPO and SFT are trl's. All are evaluated by the same command, against the same stored answers, and
compared head to head with PPO (`--against`). Best-of-n needs no training: it chooses among the
stored answers by the reward model, so its row comes from the evaluation of PPO.
"""

from collections.abc import Iterator
from pathlib import Path

from experiment import (
    SHOWN_N,
    Config,
    Table,
    draw,
    flags,
    gold_of,
    interval,
    rank_by_signal,
    run,
    sampled_prompts,
    stage,
    write_dataset,
)
from shaping import outcome

from labeling_app.data_io.exporting import pairs
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
    model, base = config["model"], ["--model", config["model"]]
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
        policy = out / method
        if not policy.exists():
            fine_tune(method, train, model, policy, config[method])
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


def fine_tune(
    method: str, records: list[RankedPrompt], model: str, out: Path, settings: Config
) -> None:
    """Train a copy of the model with trl and save it as a plain folder."""
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from rlhf.modeling.models import load_causal_lm, save_model
    from rlhf.modeling.tokens import load_tokenizer

    kinds = {"dpo": (DPOConfig, DPOTrainer, preferences), "sft": (SFTConfig, SFTTrainer, best)}
    make_config, trainer_of, rows_of = kinds[method]
    tokenizer = load_tokenizer(model)
    on_cpu = not torch.cuda.is_available()
    trainer = trainer_of(
        model=load_causal_lm(model),
        args=make_config(
            output_dir=str(out.with_name(f".{out.name}.trl")),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=on_cpu,
            dataloader_pin_memory=not on_cpu,
            activation_checkpointing=False,
            **settings,
        ),
        train_dataset=Dataset.from_list(list(rows_of(records))),
        processing_class=tokenizer,
    )
    trainer.train()
    save_model(trainer.model, tokenizer, out)


def preferences(records: list[RankedPrompt]) -> Iterator[Config]:
    """Every pair that the rankings imply, ties left out."""
    for record in records:
        texts = {response.id: response.text for response in record.responses}
        for better, worse, _ in pairs(record.rankings[0]):
            yield {
                "prompt": record.prompt.chat,
                "chosen": [{"role": "assistant", "content": texts[better]}],
                "rejected": [{"role": "assistant", "content": texts[worse]}],
            }


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
