"""People's labels, from end to end: a reward model, a policy, and a judge of other people's labels.

The labels are the utilitarianism part of ETHICS (Hendrycks et al., arXiv 2008.02275): which of two
things that happened is the more pleasant for the person who tells it. A reward model learns the
labels of split A; PPO trains the policy to go on with stories whose first sentences no label has;
a reward model of split B, other people's labels of other texts, judges the answers. `data` is a
file, or the name of a dataset on the hub with the columns that ETHICS has.

Measured on held-out prompts, per seed: win rates by the disjoint judge and by the reward model
itself, the share of answers that end, the reverse KL, how likely the answers are under the original
model, and the share of answers that hold the commonest four words in a row. `steps` adds runs of
other lengths with the first seed, for the picture.
"""

import gzip
import json
import re
from collections.abc import Iterable
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
from experiment import Config, Table, flags, interval, rlhf, run, stage, write_dataset
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from policies.evaluate.statistics import bootstrap_interval, compare
from rlhf.errors import InputError
from rlhf.records.jsonl import read_jsonl, write_jsonl
from rlhf.records.ranked import read_ranked_file
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response
from rlhf.run.rundir import RunDir

SPLITS = ("A", "B", "heldout")
SHOWN_SAMPLES = 20


def measure(config: Config, out: Path) -> Config:
    """Train reward model and judge once; train and evaluate a policy for every seed and length."""
    pairs = read_pairs(config["data"])
    accuracies = {
        "reward": train_reward(config, pairs, "A", out / "reward"),
        "judge": train_reward(config, pairs, "B", out / "judge"),
    }
    firsts = first_sentences(pairs["heldout"])
    prompts = write_dataset(out / "prompts", story_prompts(config, firsts))
    reference = out / "reference"
    base = ["--model", config["model"], *flags(config["reference"])]
    stage(reference, "reference", "--prompts", prompts, *base)
    runs = [(seed, config["ppo"]["steps"]) for seed in config["seeds"]]
    runs += [(config["seeds"][0], steps) for steps in config["steps"]]
    found = [train_policy(config, out, seed, steps) for seed, steps in runs]
    last = out / f"evaluate-{config['seeds'][0]}-{config['ppo']['steps']}"
    return {
        "accuracy": accuracies,
        "runs": found[: len(config["seeds"])],
        "lengths": sorted([found[0], *found[len(config["seeds"]) :]], key=lambda one: one["steps"]),
        "samples": first_samples(last, config["evaluate"]["samples"]),
    }


def read_pairs(data: str) -> dict[str, list[Config]]:
    """Judged pairs by split: `prefix`, what both texts share, `chosen` and `rejected`.

    Raises:
        InputError: there is no such file.
    """
    path = Path(data)
    if path.is_file():
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            rows = [json.loads(line) for line in stream]
    elif path.suffix:
        raise InputError(f"No such data: {path}", "Give a file or a dataset of the hub as `data`.")
    else:
        rows = read_hub(data)
    return {name: [row for row in rows if row["split"] == name] for name in SPLITS}


def read_hub(name: str) -> list[Config]:
    """The pairs of a dataset with the columns `baseline`, the more pleasant, and `less_pleasant`.

    Every first sentence falls into one split, by its hash: 45 % A, 45 % B, 10 % held out.
    """
    from datasets import load_dataset

    rows = []
    for line in load_dataset(name, "utilitarianism", split="train"):
        chosen, rejected = line["baseline"].strip(), line["less_pleasant"].strip()
        first = first_sentence(chosen).lower()
        place = int(sha256(first.encode()).hexdigest(), 16) % 100
        split = "A" if place < 45 else "B" if place < 90 else "heldout"
        prefix = shared_words(chosen, rejected)
        rows.append({"prefix": prefix, "chosen": chosen, "rejected": rejected, "split": split})
    return rows


def shared_words(first: str, second: str) -> str:
    """The words with which both texts begin."""
    both = zip(first.split(), second.split(), strict=False)
    alike = [one == other for one, other in both]
    length = alike.index(False) if False in alike else len(alike)
    return " ".join(first.split()[:length])


def first_sentence(text: str) -> str:
    """A text up to the end of its first sentence."""
    return re.split(r"(?<=[.!?])\s", text.strip(), maxsplit=1)[0]


def first_sentences(pairs: Iterable[Config]) -> list[str]:
    """The first sentences of texts that go on after it; sorted, each once."""
    texts = {pair[kind] for pair in pairs for kind in ("chosen", "rejected")}
    found = {first_sentence(text) for text in texts if text != first_sentence(text)}
    return sorted(one for one in found if one.endswith(".") and len(one.split()) >= 4)


def ask(config: Config, beginning: str) -> tuple[Message, ...]:
    """The conversation that asks for a story: worked turns, then the beginning of this one."""
    messages = []
    for start, story in config["turns"]:
        messages.append(Message(role="user", content=config["question"].format(start)))
        messages.append(Message(role="assistant", content=story))
    return (*messages, Message(role="user", content=config["question"].format(beginning)))


def as_records(config: Config, pairs: Iterable[Config], split: str) -> list[RankedPrompt]:
    """Judged pairs as records: one prompt for all texts with one prefix, a ranking a pair."""
    by_prefix: dict[str, list[Config]] = {}
    for pair in pairs:
        by_prefix.setdefault(pair["prefix"], []).append(pair)
    records = []
    for prefix, judged in by_prefix.items():
        prompt = Prompt.create(ask(config, prefix), split, "ethics")
        texts = dict.fromkeys(
            text for pair in judged for text in (pair["chosen"], pair["rejected"])
        )
        responses = {
            text: Response(id=f"{prompt.id}-{n}", prompt_id=prompt.id, text=text, model="people")
            for n, text in enumerate(texts)
        }
        rankings = tuple(
            Ranking(
                id=f"{prompt.id}-ranking-{n}",
                prompt_id=prompt.id,
                annotator="people",
                kind="human",
                tiers=((responses[pair["chosen"]].id,), (responses[pair["rejected"]].id,)),
            )
            for n, pair in enumerate(judged)
        )
        answers = tuple(responses.values())
        records.append(RankedPrompt(prompt=prompt, responses=answers, rankings=rankings))
    return records


def is_bare(pair: Config) -> bool:
    """Whether one of the two texts says no more than what both share."""
    return pair["prefix"] in (pair["chosen"], pair["rejected"])


def train_reward(config: Config, pairs: dict[str, list[Config]], split: str, out: Path) -> Config:
    """Train on one split's labels; the accuracy on held-out labels, with and without bare texts."""
    full = [pair for pair in pairs[split] if not is_bare(pair)]
    drawn = np.random.default_rng(0).permutation(len(full))[: config["pairs"]]
    train = as_records(config, (full[place] for place in drawn), "train")
    test = as_records(config, (pair for pair in pairs["heldout"] if not is_bare(pair)), "test")
    data = write_dataset(out.with_name(f"{out.name}-labels"), [*train, *test])
    base = ["--rankings", data, "--model", config["model"]]
    report = stage(out, "train-reward", *base, *flags(config["reward"]))
    bare = as_records(config, filter(is_bare, pairs["heldout"]), "test")
    found = {name: report[name] for name in ("accuracy", "likelier_wins", "longer_wins")}
    return {**found, "bare": accuracy(bare, out)}


def accuracy(records: list[RankedPrompt], reward: Path) -> Config:
    """The share of judged pairs that a reward model orders as people did."""
    right = []
    rewards = rewards_of(records, reward, reward / "bare.jsonl")
    for record, row in zip(records, rewards, strict=True):
        of = {one.id: value for one, value in zip(record.responses, row, strict=True)}
        agreed = [of[best] > of[worst] for (best,), (worst,) in (r.tiers for r in record.rankings)]
        right.append(float(np.mean(agreed)))
    return bootstrap_interval(np.array(right), seed=0).to_json()


def story_prompts(config: Config, firsts: list[str]) -> list[RankedPrompt]:
    """Beginnings of stories: for tests, for choosing settings, and the others to train on.

    `judged_on` says which of the first two are answered and judged.
    """
    mixed = [firsts[place] for place in np.random.default_rng(0).permutation(len(firsts))]
    first, second = config["test"], config["test"] + config["validation"]
    held_out = {"test": mixed[:first], "validation": mixed[first:second]}[config["judged_on"]]
    parts = {"train": mixed[second:], "test": held_out}
    return [
        RankedPrompt(
            prompt=Prompt.create(ask(config, one), split, "story"), responses=(), rankings=()
        )
        for split, some in parts.items()
        for one in some
    ]


def train_policy(config: Config, out: Path, seed: int, steps: int) -> Config:
    """One policy, and what the disjoint judge and the reward model say of its answers."""
    policy, evaluated = (out / f"{kind}-{seed}-{steps}" for kind in ("ppo", "evaluate"))
    base = ["--reference", out / "reference", "--seed", seed]
    how = [*flags(config["ppo"]), "--reward", out / "reward", "--steps", steps]
    stage(policy, "ppo", "--model", config["model"], *base, *how)
    how = [*flags(config["evaluate"]), "--reward", out / "judge"]
    report = stage(evaluated, "evaluate", "--policy", policy, *base, *how)
    answers = list(read_ranked_file(RunDir(evaluated).answers))
    proxy = np.array(rewards_of(answers, out / "reward", evaluated / "proxy.jsonl"))
    samples = config["evaluate"]["samples"]
    wins = compare(proxy[:, -samples:], proxy[:, :-samples])
    judged = report["win_rate"]["reward"]
    return {
        "seed": seed,
        "steps": steps,
        "judge": judged,
        "judge_at_equal_length": judged["length_controlled"],
        "reward": bootstrap_interval(wins, seed=0).to_json(),
        "nats": report["kl"]["reverse"]["nats"],
        "nats_per_token": report["kl"]["reverse"]["per_token"],
        **{name: report[name] for name in ("eos_rate", "length", "template", "distinct")},
        "likelihood": report["log_likelihood"],
        "retained": report["retained"],
    }


def rewards_of(records: list[RankedPrompt], reward: Path, found: Path) -> list[list[float]]:
    """The rewards of each prompt's answers, once."""
    if not found.exists():
        answers = found.with_suffix(".answers.jsonl")
        write_jsonl(answers, (record.to_json() for record in records))
        rlhf("score", answers, "--reward", reward, "--out", found)
    return [line["rewards"] for line in read_jsonl(found)]


def first_samples(evaluated: Path, samples: int) -> list[Config]:
    """The first held-out beginnings with the first answer of each model, unpicked."""
    shown = islice(read_ranked_file(RunDir(evaluated).answers), SHOWN_SAMPLES)
    return [
        {
            "beginning": record.prompt.messages[-1].content,
            "original": record.responses[0].text,
            "policy": record.responses[-samples].text,
        }
        for record in shown
    ]


def tabulate(result: Config) -> Table:
    """One row for each seed."""
    header = ["seed", "won, judged by other people's labels (95 %)", "at equal length"]
    header += ["won, by its own reward model", "reverse KL, nats a token", "answers that end"]
    rows = [[*header, "share with the commonest 4-gram"]]
    for one in result["runs"]:
        wins = [interval(one[name]) for name in ("judge", "judge_at_equal_length", "reward")]
        shares = [
            f"{100 * of['reference']:.0f} → {100 * of['policy']:.0f} %"
            for of in (one["eos_rate"], template_shares(one))
        ]
        rows.append([str(one["seed"]), *wins, f"{one['nats_per_token']:.2f}", *shares])
    return rows


def template_shares(one: Config) -> dict[str, float]:
    """The share of each model's answers with its commonest four words in a row."""
    return {side: one["template"][side]["share"] for side in ("reference", "policy")}


def plot(result: Config) -> Figure:
    """What the reward model, the disjoint judge, likelihood and template say, over the steps."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [one["steps"] for one in result["lengths"]]
    for name, label in (("reward", "its own reward model"), ("judge", "other people's labels")):
        values, lows, highs = (
            [100 * one[name][part] for one in result["lengths"]]
            for part in ("value", "low", "high")
        )
        [line] = left.plot(steps, values, marker="o", label=label)
        left.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    left.axhline(50, color="#94a3b8", linewidth=1)
    left.set_ylabel("answers that win, %")
    shares = [100 * template_shares(one)["policy"] for one in result["lengths"]]
    right.plot(steps, shares, marker="o", label="with the commonest 4-gram, % of answers")
    likelihood = [-one["likelihood"]["policy"] for one in result["lengths"]]
    twin = right.twinx()
    twin.plot(
        steps, likelihood, marker="s", color="#d97706", label="surprise of the original model"
    )
    twin.set_ylabel("nats a token")
    right.set_ylabel("% of answers")
    for axes in (left, right):
        axes.set_xlabel("PPO steps")
        axes.spines["top"].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    twin.legend(frameon=False, fontsize=8, loc="lower right")
    twin.spines["top"].set_visible(False)
    return figure


if __name__ == "__main__":
    run("people", measure, tabulate, plot)
