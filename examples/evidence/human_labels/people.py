"""People's labels, from end to end: a reward model, a policy, and a judge of other people's labels.

The labels are the utilitarianism part of ETHICS (Hendrycks et al., arXiv 2008.02275): which of two
things that happened is the more pleasant for the person who tells it. A reward model learns the
labels of split A; PPO trains the policy to go on with stories whose first sentences no label has;
a reward model of split B, other people's labels of other texts, judges the responses. Those of the
first seed wait in `votes.db` for people to compare them blind (`rlhf label --db`). `data` is a
file, or the name of a dataset on the hub with the columns that ETHICS has.

Measured on held-out prompts, per seed: win rates by the disjoint judge and by the reward model
itself, the share of responses that end with an end token, the reverse KL, how likely the responses
are under the original model, the share of responses with the most frequent 4-gram, and the increase
in NLL on neutral text. `steps` adds runs of other lengths with the first seed, for the picture.
`ptx`, where it is given, adds one of the first seed whose loss has texts of an encyclopedia in it
(PPO-ptx), to see whether that lowers the increase.
"""

import gzip
import json
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.commands import Config, at_once, flags, rlhf, stage
from examples.evidence.experiment import Table, interval, run, signed, write_dataset
from examples.evidence.human_labels.ethics import (
    as_records,
    ask,
    first_sentences,
    is_bare,
    read_pairs,
)
from rlhf.errors import InputError
from rlhf.records.jsonl import write_jsonl
from rlhf.records.ranked import read_ranked_file
from rlhf.records.schema import Prompt, RankedPrompt
from rlhf.run.rundir import RunDir

SHOWN_SAMPLES = 20
SHORTEST_TEXT = 100  # characters; shorter parts are titles of passages
SCORING = ("precision", "batch_size")  # settings of reference outputs that count for rewards
MODELS = ("reference", "policy")  # before and after, as reports name them


def measure(config: Config, out: Path) -> Config:
    """Train reward model and judge once; train and evaluate a policy for every seed and length."""
    pairs = read_pairs(config["data"])
    stories = story_prompts(config, first_sentences(pairs["heldout"]))
    accuracies = prepare(config, out, pairs, stories)
    first, steps = config["seeds"][0], config["ppo"]["steps"]
    train = partial(train_policy, config, out)
    others = [partial(train, first, {"steps": num_steps}) for num_steps in config["steps"]]
    if ptx := config.get("ptx"):
        texts = write_texts(Path(ptx["texts"]), out / "texts.txt")
        settings = {"ptx.data": texts, **ptx["settings"]}
        others.append(partial(train, first, settings, name=f"ptx-{first}"))
    run_results = at_once(*others, *(partial(train, seed, {}) for seed in config["seeds"]))
    last = out / f"evaluate-{first}-{steps}"
    rlhf("evaluate", "--out", last, "--to-db", out / "votes.db")
    runs = run_results[len(others) :]
    lengths = [runs[0], *run_results[: len(config["steps"])]]
    result = {
        "accuracy": accuracies,
        "runs": runs,
        "lengths": sorted(lengths, key=lambda run_result: run_result["steps"]),
        "samples": first_samples(last, config["evaluate"]["samples"]),
    }
    return result | ({"ptx": run_results[len(others) - 1]} if ptx else {})


def prepare(
    config: Config,
    out: Path,
    pairs: dict[str, list[Config]],
    stories: list[RankedPrompt],
    labels: int | None = None,
) -> Config:
    """Train reward model and judge, and store the original's responses; both accuracies.

    With fewer `labels` the reward model is trained sooner: then responses are stored while the
    judge learns. Else they have all cores.

    Args:
        config: of `people`.
        out: folder of the experiment.
        pairs: judged pairs by split.
        stories: the prompts that the original model answers.
        labels: of the reward model; as many as the judge's if not given.
    """
    number = config["pairs"]
    judge = partial(train_reward, config, pairs, "B", out / "judge", number)
    reward = partial(train_reward, config, pairs, "A", out / "reward", labels or number)
    store = partial(store_outputs, config, out, stories)
    of_judge, of_reward, *_ = at_once(judge, reward, *([store] if labels else []))
    if not labels:
        store()
    settings = {name: config["reference"][name] for name in SCORING if name in config["reference"]}
    rlhf("reference", "--reward", out / "reward", "--out", out / "reference", *flags(settings))
    return {"reward": of_reward, "judge": of_judge}


def store_outputs(config: Config, out: Path, records: list[RankedPrompt]) -> None:
    """Store the original model's responses to some prompts."""
    prompts = write_dataset(out / "reference-prompts", records)
    base = ["--prompts", prompts, "--model", config["model"]]
    stage(out / "reference", "reference", *base, *flags(config["reference"]))


def train_reward(
    config: Config, pairs: dict[str, list[Config]], split: str, out: Path, number: int
) -> Config:
    """Train on labels of one split; the accuracy on held-out ones, with and without bare texts."""
    full = [pair for pair in pairs[split] if not is_bare(pair)]
    drawn = np.random.default_rng(0).permutation(len(full))[:number]
    train = as_records(config, (full[index] for index in drawn), "train")
    test = as_records(config, (pair for pair in pairs["heldout"] if not is_bare(pair)), "test")
    data = write_dataset(out.with_name(f"{out.name}-labels"), [*train, *test])
    base = ["--rankings", data, "--model", config["model"]]
    report = stage(out, "train-reward", *base, *flags(config["reward"]))
    bare = as_records(config, filter(is_bare, pairs["heldout"]), "test")
    rates = {name: report[name] for name in ("accuracy", "likelier_wins")}
    longer = report["health"]["longer_wins"]
    return {**rates, "longer_wins": longer, "bare": accuracy(bare, out, config["score"])}


def accuracy(records: list[RankedPrompt], reward: Path, settings: Config) -> Config:
    """The share of judged pairs that a reward model orders as people did."""
    file, out = reward / "bare.jsonl", reward / "bare"
    if not (out / "report.json").is_file():
        write_jsonl(file, (record.to_json() for record in records))
        rlhf("score", "--rankings", file, "--reward", reward, "--out", out, *flags(settings))
    return RunDir(out).read_report()["accuracy"]


def story_prompts(config: Config, firsts: list[str]) -> list[RankedPrompt]:
    """Prompts for stories: for tests, for choosing settings, and the others to train on.

    `judged_on` says which of the first two are answered and judged.
    """
    mixed = [firsts[index] for index in np.random.default_rng(0).permutation(len(firsts))]
    first, second = config["test"], config["test"] + config["validation"]
    held_out = {"test": mixed[:first], "validation": mixed[first:second]}[config["judged_on"]]
    parts = {"train": mixed[second:], "test": held_out}
    return [
        RankedPrompt(
            prompt=Prompt.create(ask(config, sentence), split, "story"), responses=(), rankings=()
        )
        for split, sentences in parts.items()
        for sentence in sentences
    ]


def train_policy(
    config: Config, out: Path, seed: int, changes: Config, *, name: str | None = None
) -> Config:
    """One policy, by the settings of `ppo` and what changes in them, and what it was judged."""
    settings = config["ppo"] | changes
    name = name or f"{seed}-{settings['steps']}"
    policy = out / f"ppo-{name}"
    base = ["--reference", out / "reference", "--reward", out / "reward", "--seed", seed]
    stage(policy, "ppo", "--model", config["model"], *base, *flags(settings))
    return judge_policy(config, policy, out, seed) | {"steps": settings["steps"]}


def judge_policy(config: Config, policy: Path, labels: Path, seed: int) -> Config:
    """Judge a policy's responses by the disjoint judge and by the reward model.

    `labels` is the folder with reward model, judge and reference outputs.
    """
    evaluated = policy.with_name(f"evaluate-{policy.name.removeprefix('ppo-')}")
    report = stage(
        evaluated,
        *("evaluate", "--policy", policy, "--reference", labels / "reference", "--seed", seed),
        *("--reward", labels / "reward", "--gold", labels / "judge", *flags(config["evaluate"])),
    )
    rates = report["win_rate"]
    measures = ("eos_rate", "length", "template", "distinct", "repeats")
    return {
        "seed": seed,
        "judge": rates["gold"],
        "judge_at_equal_length": rates["gold"]["length_controlled"],
        "reward": rates["reward"],
        "gain": report["gold"]["policy"]["mean"] - report["gold"]["reference"]["mean"],
        "nats": report["kl"]["reverse"]["nats"],
        "nats_per_token": report["kl"]["reverse"]["per_token"],
        **{key: report[key] for key in (*measures, "log_likelihood", "retained")},
    }


def first_samples(evaluated: Path, samples: int) -> list[Config]:
    """The first held-out prompts with the first response of each model, not cherry-picked."""
    shown = islice(read_ranked_file(RunDir(evaluated).answers), SHOWN_SAMPLES)
    return [
        {
            "beginning": record.prompt.messages[-1].content,
            "original": record.responses[0].text,
            "policy": record.responses[-samples].text,
        }
        for record in shown
    ]


def write_texts(data: Path, file: Path) -> Path:
    """The passages that people's questions come with, one on each line, for `--ptx.data`.

    Raises:
        InputError: there is no such file.
    """
    if not data.is_file():
        raise InputError(f"No such texts: {data}", "Give their path as `texts` in a --config file.")
    with gzip.open(data, "rt", encoding="utf-8") as stream:
        passages = [json.loads(line)["prompt"].partition("Passages:\n")[2] for line in stream]
    parts = [part.strip() for passage in passages for part in passage.split("\n\n")]
    lines = dict.fromkeys(part for part in parts if len(part) > SHORTEST_TEXT)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def tabulate(result: Config) -> Table:
    """One row for each seed."""
    header = ["seed", "won, judged by other people's labels (95 %)", "at equal length"]
    header += ["won, by its own reward model", "reverse KL, nats per token", "responses that end"]
    header += ["with the most frequent 4-gram", "log-likelihood under the original"]
    rows = [[*header, "increase in NLL on neutral text, nats per token (95 %)"]]
    runs = [(str(run_result["seed"]), run_result) for run_result in result["runs"]]
    if ptx := result.get("ptx"):
        runs.append((f"{ptx['seed']}, with texts in the loss", ptx))
    for name, run_result in runs:
        wins = [interval(run_result[name]) for name in ("judge", "judge_at_equal_length", "reward")]
        shares = [
            " → ".join(f"{100 * of[model]:.0f}" for model in MODELS) + " %"
            for of in (run_result["eos_rate"], template_shares(run_result))
        ]
        likelihood = " → ".join(
            f"{run_result['log_likelihood'][model]['value']:.2f}" for model in MODELS
        )
        cells = [*wins, f"{run_result['nats_per_token']:.2f}", *shares, likelihood]
        rows.append([name, *cells, signed(run_result["retained"]["difference"])])
    return rows


def template_shares(run_result: Config) -> dict[str, float]:
    """The share of each model's responses with its most frequent 4-gram."""
    return {model: run_result["template"][model]["share"] for model in MODELS}


def plot(result: Config) -> Figure:
    """Win rates by the reward model and the disjoint judge, template and likelihood by steps."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    wins, templates, likelihoods = figure.subplots(1, 3)
    lengths = result["lengths"]
    steps = [0, *(run_result["steps"] for run_result in lengths)]
    even = {"value": 0.5, "low": 0.5, "high": 0.5}  # the original against itself
    for name, label in (("reward", "its own reward model"), ("judge", "other people's labels")):
        draw_line(
            wins, steps, [even, *(run_result[name] for run_result in lengths)], label, percent=True
        )
    wins.axhline(50, color="#94a3b8", linewidth=1)
    wins.set_ylabel("win rate, %")
    wins.legend(title="judged by", frameon=False, fontsize=8)
    before = template_shares(lengths[0])[MODELS[0]]
    shares = [before, *(template_shares(run_result)[MODELS[1]] for run_result in lengths)]
    templates.plot(steps, [100 * share for share in shares], marker="o")
    templates.set_ylim(bottom=0)
    templates.set_ylabel("responses with the most frequent 4-gram, %")
    own = lengths[0]["log_likelihood"][MODELS[0]]
    draw_line(
        likelihoods,
        steps,
        [own, *(run_result["log_likelihood"][MODELS[1]] for run_result in lengths)],
    )
    likelihoods.set_ylabel("log-likelihood under the original, nats per token")
    for axes in (wins, templates, likelihoods):
        axes.set_xlabel("PPO steps")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_line(
    axes: Axes, steps: list[int], estimates: list[Config], label: str = "", *, percent: bool = False
) -> None:
    """A line with its 95 % intervals."""
    scale = 100 if percent else 1
    values, lows, highs = (
        [
            scale * (estimate[part] if estimate[part] is not None else estimate["value"])
            for estimate in estimates
        ]
        for part in ("value", "low", "high")
    )
    [line] = axes.plot(steps, values, marker="o", label=label)
    axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)


if __name__ == "__main__":
    run("people", measure, tabulate, plot)
